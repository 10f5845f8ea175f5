//! Checks the `Host` header of requests over TCP.
//!
//! An attacker can make the name of a web page resolve to an address of this network ("DNS
//! rebinding"). The browser of an operator then sends requests with that name to this director, and
//! the page reads the answers. So requests are answered only if the name is a known name of this
//! director. Addresses are accepted, because an attacker cannot control them.

use std::net::{Ipv4Addr, Ipv6Addr};

use hyper::header;
use hyper::http::request::Parts;
use hyper::http::uri::Authority;

pub(super) fn own_name() -> String {
    let own = rustix::system::uname();
    own.nodename().to_string_lossy().into_owned()
}

/// Checks that a request is for a name or address that this `lvsd` answers to.
///
/// # Errors
/// The name in the request that this `lvsd` does not answer to.
pub(super) fn check(head: &Parts, allowed: &[String]) -> Result<(), String> {
    let own = own_name();
    let known = |name: &str| {
        let names = allowed.iter().map(String::as_str);
        names
            .chain(["localhost", own.as_str()])
            .any(|known| name.eq_ignore_ascii_case(known))
    };
    let target = head.uri.authority().map(Authority::as_str);
    let headers = head.headers.get_all(header::HOST).iter();
    // No browser sends a request without `Host`.
    let headers = headers.map(|value| value.to_str().unwrap_or("?"));
    for host in headers.chain(target) {
        let name = without_port(host);
        if !is_address(name) && !known(name.strip_suffix('.').unwrap_or(name)) {
            return Err(host.to_owned());
        }
    }
    Ok(())
}

fn without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

fn is_address(name: &str) -> bool {
    let within = name
        .strip_prefix('[')
        .and_then(|rest| rest.strip_suffix(']'));
    match within {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => name.parse::<Ipv4Addr>().is_ok(),
    }
}

#[cfg(test)]
mod tests {
    use hyper::Request;

    use super::*;

    fn is_answered(uri: &str, hosts: &[&str]) -> bool {
        let mut request = Request::builder().uri(uri);
        for host in hosts {
            request = request.header(header::HOST, *host);
        }
        let (head, ()) = request.body(()).expect("the request is valid").into_parts();
        check(&head, &["lb.example.com".to_owned()]).is_ok()
    }

    #[test]
    fn api_answers_request_whose_host_is_an_address_a_known_name_or_missing() {
        let own = rustix::system::uname();
        let own = own.nodename().to_str().expect("the text is UTF-8");
        for host in [
            "127.0.0.1",
            "192.0.2.1:9560",
            "[::1]:9560",
            "[2001:db8::1]",
            "localhost",
            "LOCALHOST:9560",
            "lb.example.com",
            "lb.example.com.:443",
            "Lb.Example.Com:9560",
            own,
        ] {
            assert!(is_answered("/metrics", &[host]), "{host}");
        }
        // HTTP/1.0.
        assert!(is_answered("/metrics", &[]));
        assert!(is_answered(
            "http://127.0.0.1:9560/metrics",
            &["127.0.0.1:9560"]
        ));
    }

    #[test]
    fn api_request_with_unknown_or_malformed_host_is_refused() {
        for host in [
            "evil.example",
            "evil.example:9560",
            "lb.example.com.evil.example",
            "evil.lb.example.com",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "[evil.example]",
            "127.0.0.1:80:80",
            "::1",
            "",
            ":9560",
        ] {
            assert!(!is_answered("/metrics", &[host]), "{host}");
        }
        assert!(!is_answered("/metrics", &["127.0.0.1", "evil.example"]));
        assert!(!is_answered("http://evil.example/metrics", &["127.0.0.1"]));
    }
}

//! `type = "https"`: as `http`, over TLS.

use std::net::SocketAddr;

use lvs_core::Protocol;

use super::http::Http;
use super::tls::Tls;
use super::{Advice, Asked, Port, ProbeError, ProbeKind};
use crate::text::Keys;

/// A check of a server's pages over TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Https {
    http: Http,
    tls: Tls,
}

impl ProbeKind for Https {
    const NAME: &'static str = "https";
    const KEYS: &'static [&'static str] = {
        let [
            port,
            host,
            path,
            method,
            status,
            body,
            regex,
            redirects,
            urls,
        ] = Http::OWN;
        &[
            port, host, path, method, status, body, regex, redirects, urls, "sni", "ca", "cert",
            "key",
        ]
    };
    const VIA: Option<Protocol> = Some(Protocol::TCP);

    fn parse(keys: &mut Keys<'_>) -> Option<Self> {
        let http = Http::read(keys);
        let host = http.as_ref().and_then(Http::host);
        let tls = Tls::parse(keys, host);
        Some(Self {
            tls: tls?,
            http: http?,
        })
    }

    fn port(&mut self) -> Option<&mut Port> {
        self.http.port()
    }

    fn target(&self, server: SocketAddr) -> String {
        format!("https://{}", self.http.address(server))
    }

    async fn run(&self, asked: &Asked<'_>) -> Result<Advice, ProbeError> {
        let target = self.http.address(asked.server);
        let connect = || asked.connect(target);
        let open = || self.tls.meet_by(connect, target);
        self.http.ask("https", asked, open).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::health::probe::hostile::{endless, probe, survives};

    /// The beginning of a TLS 1.2 server's answer: a handshake record with the expected content.
    const HELLO: &[u8] = &[
        0x16, 0x03, 0x03, 0x00, 0x31, 0x02, 0x00, 0x00, 0x2d, 0x03, 0x03, 1, 2, 3, 4, 5, 6, 7, 8,
        9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
        32, 0x00, 0xc0, 0x2f, 0x00, 0x00, 0x05, 0xff, 0x01, 0x00, 0x01, 0x00,
    ];

    #[tokio::test]
    async fn https_probe_ends_in_time_for_hostile_or_endless_answer() {
        survives("{ type = \"https\" }", HELLO).await;
        let quick = "{ type = \"https\", timeout = \"250ms\", interval = \"1s\" }";
        for (first, then) in [
            (HELLO, &[0x16, 3, 3, 0x40, 0][..]),
            (&[0x16, 3, 3, 0xff, 0xff][..], &[0; 64][..]),
            (&[0x15, 3, 3, 0, 2, 1, 0][..], &[0x15, 3, 3, 0, 2, 1, 0][..]),
            (HELLO, &[0x14, 3, 3, 0, 1, 1][..]),
        ] {
            let server = endless(first, then).await;
            let result = probe(quick, server).await;
            assert!(
                matches!(result, Err(ProbeError::Server(_))),
                "{first:?}, {then:?}: {result:?}"
            );
        }
    }

    #[test]
    fn https_check_with_invalid_tls_or_host_key_is_refused_at_load() {
        let directory = tempfile::tempdir().expect("the temporary directory can be created");
        let file = directory.path().join("pem");
        std::fs::write(&file, "no certificate of this kind").expect("the file can be written");
        let path = file.display().to_string();
        for (more, wanted) in [
            (
                format!("ca = \"{path}\""),
                "the file contains no certificate",
            ),
            ("ca = \"/no/such/file\"".to_owned(), "No such file"),
            (format!("cert = \"{path}\""), "`cert` needs `key`"),
            (format!("key = \"{path}\""), "`key` needs `cert`"),
            (
                "sni = \"not a name\"".to_owned(),
                "`sni` is not the name of a host",
            ),
            ("host = \"a b\"".to_owned(), "is not a host"),
        ] {
            let text = format!(
                "[[service]]\naddress = \"192.0.2.10:443\"\nforward = \"nat\"\ncheck = {{ type = \"https\", {more} }}\n\
                 [[service.server]]\naddress = \"10.0.0.1\"\n"
            );
            let report = Config::from_toml("test.toml", &text).expect_err(&more);
            let output = report.to_string();
            assert!(output.contains(wanted), "{more}: no {wanted:?} in {output}");
            assert!(
                output.contains("test.toml:4:"),
                "{more}: no `test.toml:4:` in {output}"
            );
        }
    }
}

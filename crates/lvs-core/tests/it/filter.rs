//! Filters of new connections by source prefix.
#![cfg(feature = "api")]

use std::net::SocketAddr;

use lvs_core::api::{Call, Permissive};
use lvs_core::filter::{FilterLists, SourceFilter};
use lvs_core::{
    Director, DropReason, Family, Forwarding, Hook, Instant, Options, PacketMeta, ServerConfig,
    ServiceConfig, ServiceFlags, ServiceKey, TcpFlags, Verdict,
};

const VIP: &str = "198.51.100.1:80";
const FILTERED: Verdict = Verdict::Drop(DropReason::Filtered);

fn packet(client: &str, flags: u8) -> PacketMeta<'static> {
    PacketMeta::tcp(
        Hook::Local,
        client.parse().unwrap(),
        VIP.parse().unwrap(),
        flags,
    )
}

fn director(persistent: bool) -> (Director, ServiceKey) {
    let mut director = Director::new(Options::default());
    let key = ServiceKey::tcp(VIP.parse().unwrap());
    let mut config = ServiceConfig::new(Family::V4, "rr");
    if persistent {
        config.flags = ServiceFlags(ServiceFlags::PERSISTENT);
        config.timeout = 300;
    }
    let control = &mut director.control;
    control.add_service(key, config, None).unwrap();
    let server: SocketAddr = "10.0.0.1:80".parse().unwrap();
    let config = ServerConfig::new(1, Forwarding::Nat);
    control
        .add_server(&key, server, &config, Instant::ZERO)
        .unwrap();
    (director, key)
}

fn filter(allow: &[&str], deny: &[&str]) -> SourceFilter {
    let read = |list: &[&str]| list.iter().map(|text| text.parse().unwrap()).collect();
    SourceFilter::new(FilterLists {
        allow: read(allow),
        deny: read(deny),
    })
    .unwrap()
}

fn is_taken(director: &mut Director, client: &str, flags: u8) -> bool {
    match director.handle_packet(&packet(client, flags), Instant::ZERO) {
        Verdict::Forward(_) => true,
        FILTERED => false,
        other => panic!("{client} is neither accepted nor filtered: {other:?}"),
    }
}

#[test]
fn denied_source_opens_no_connection_and_open_connections_continue() {
    for persistent in [false, true] {
        let (mut director, key) = director(persistent);
        let early = "192.0.2.7:4000";
        assert!(is_taken(&mut director, early, TcpFlags::SYN));
        let deny = filter(&[], &["192.0.2.0/24"]);
        director.control.set_filter(Some(&key), deny).unwrap();
        assert!(is_taken(&mut director, early, TcpFlags::ACK));
        // The client's template does not permit another connection.
        assert!(!is_taken(&mut director, "192.0.2.7:4001", TcpFlags::SYN));
        assert!(is_taken(&mut director, "192.0.3.7:4000", TcpFlags::SYN));
        assert_eq!(director.shard.len(), 2);
        let explanation = director.control.explain(
            &director.shard,
            packet("192.0.2.8:4000", 0).tuple,
            0,
            Instant::ZERO,
        );
        assert_eq!(
            explanation.verdict,
            "dropped: 192.0.2.0/24 is denied by the service's filter"
        );
        // Without a filter, the service behaves like the kernel.
        let off = SourceFilter::default();
        director.control.set_filter(Some(&key), off).unwrap();
        assert!(is_taken(&mut director, "192.0.2.7:4001", TcpFlags::SYN));
    }
}

#[test]
fn director_filter_covers_all_services_and_deleted_service_has_no_filter() {
    let (mut director, key) = director(false);
    let all = filter(&["10.0.0.0/8"], &[]);
    director.control.set_filter(None, all.clone()).unwrap();
    assert!(is_taken(&mut director, "10.1.2.3:4000", TcpFlags::SYN));
    assert!(!is_taken(&mut director, "192.0.2.7:4000", TcpFlags::SYN));
    let own = filter(&["192.0.2.7"], &[]);
    director.control.set_filter(Some(&key), own).unwrap();
    assert!(is_taken(&mut director, "192.0.2.7:4000", TcpFlags::SYN));
    director
        .control
        .delete_service(&key, Instant::ZERO)
        .unwrap();
    let filters: Vec<_> = director.control.filters().collect();
    assert_eq!(filters, [(None, all)]);
    let nothing = SourceFilter::default();
    assert!(director.control.set_filter(Some(&key), nothing).is_err());
}

#[test]
fn filter_calls_are_parsed_strictly_and_applied_completely_or_refused() {
    let (mut director, key) = director(false);
    let call = |text: &str| serde_json::from_str::<Call>(text);
    let spec = r#"{"method":"filter.set","params":{"service":{"protocol":"tcp","address":"198.51.100.1:80"},"deny":["192.0.2.0/24"]}}"#;
    let set = call(spec).unwrap();
    assert_eq!(serde_json::to_string(&set).unwrap(), spec);
    for (bad, why) in [
        (r#"{"deny":["192.0.2.0/33"]}"#, "expected an address"),
        (
            r#"{"deny":["::1"],"allow":["::1"]}"#,
            "both allowed and denied",
        ),
        (r#"{"deny":"::1"}"#, "invalid type"),
    ] {
        let text = format!(r#"{{"method":"filter.set","params":{bad}}}"#);
        let error = call(&text).unwrap_err().to_string();
        assert!(
            error.contains(why),
            "no {why:?} in the error of {bad}: {error}"
        );
    }
    let delete = Call::ServiceDelete {
        service: key.into(),
    };
    let control = &mut director.control;
    let refused = control.apply(&[delete, set.clone()], &Permissive, Instant::ZERO);
    assert_eq!(refused.unwrap_err().change, 1);
    assert_eq!(control.filters().count(), 0);
    control.apply(&[set], &Permissive, Instant::ZERO).unwrap();
    assert_eq!(control.filters().count(), 1);
}

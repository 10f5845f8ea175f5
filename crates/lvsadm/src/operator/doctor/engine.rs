//! What the engine says about itself: its interfaces, its connection table, its counters.

use lvs_core::api::{Info, ReasonCount};

use super::Findings;

pub(super) fn look(info: &Info, reasons: &[ReasonCount], findings: &mut Findings) {
    state(info, findings);
    counters(reasons, findings);
}

fn state(info: &Info, findings: &mut Findings) {
    if info.interfaces.is_empty() {
        findings.add(
            "the engine uses no interface: no packet reaches it",
            "bring an Ethernet interface up, or name one with lvs-dataplane --interface",
        );
    }
    for interface in info.interfaces.iter().filter(|interface| !interface.up) {
        findings.add(
            format!("{} is down", interface.name),
            format!(
                "ip link set {} up; check cable and switch port",
                interface.name
            ),
        );
    }
    if info.capacity > 0 && info.connections * 10 > info.capacity * 9 {
        findings.add(
            format!(
                "the connection table is nearly full: {} of {} entries are in use",
                info.connections, info.capacity
            ),
            "start lvs-dataplane with a larger --max-connections; when the table is full, new connections are dropped",
        );
    }
    let in_kernel = &info.in_kernel;
    if in_kernel.wanted && !in_kernel.active {
        findings.add(
            format!(
                "established connections are not forwarded in the kernel: {}",
                in_kernel.reason
            ),
            in_kernel.remedy.clone(),
        );
    }
    for conflict in &info.conflicts {
        findings.add(
            format!(
                "{} answers ARP for {}, a virtual address",
                conflict.mac, conflict.address
            ),
            "remove the address from that host; if it is a real server that needs it (direct routing, tunnelling), \
             put it on lo there and set net.ipv4.conf.all.arp_ignore=1 and arp_announce=2",
        );
    }
}

fn counters(reasons: &[ReasonCount], findings: &mut Findings) {
    for reason in reasons {
        // Packets that were too big are reported by server, lost frames by interface.
        let reported = ["too_big", "not_received"].contains(&reason.reason.as_str());
        if reason.action == "drop" && reason.count > 0 && !reported {
            findings.add(
                format!(
                    "{} packets were dropped: {}: {}",
                    reason.count, reason.reason, reason.help
                ),
                reason.remedy.clone(),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_the_kernel_that_stands_aside() {
        let found = |active: bool| {
            let mut info = Info::default();
            info.interfaces.clear();
            info.in_kernel.wanted = true;
            info.in_kernel.active = active;
            info.in_kernel.reason = "another is first".to_owned();
            info.in_kernel.remedy = "have it go".to_owned();
            let mut findings = Findings::default();
            state(&info, &mut findings);
            let mut found = findings.0.into_iter();
            found.find(|finding| finding.what.contains("in the kernel"))
        };
        assert!(found(true).is_none());
        let finding = found(false).expect("one");
        assert!(finding.what.ends_with(": another is first"), "{finding:?}");
        assert_eq!(finding.cure, "have it go");
    }

    #[test]
    fn an_interface_that_is_down() {
        let info: Info = serde_json::from_str(
            r#"{"interfaces": [{"name": "eth0", "backend": "af_packet", "mtu": 1500, "up": false}]}"#,
        )
        .expect("info");
        let mut findings = Findings::default();
        state(&info, &mut findings);
        assert_eq!(findings.0.len(), 1, "{findings:?}");
        assert!(findings.0[0].cure.starts_with("ip link set eth0 up"));
    }
}

//! The codes of findings.

use lvs_core::reasons;

reasons! {
    /// The kind of a finding. `docs/operating.md` has each with its fix.
    Code {
        /// Neither an interface of this host nor the dataplane has a virtual address.
        VipUnowned => "vip_unowned",
        /// All servers of a service have weight 0, or it has no server.
        ServiceUnusable => "service_unusable",
        /// A server has reached its upper threshold of connections.
        Threshold => "threshold",
        /// Connections of clients to a server get no answer.
        ClientsUnanswered => "clients_unanswered",
        /// A service of FTP through NAT has no helper.
        FtpWithoutHelper => "ftp_without_helper",
        /// Packets of clients did not fit the path to a server.
        TooBig => "too_big",
        /// The path through tunnels has no room for a full packet and its tunnel header.
        TunnelMtu => "tunnel_mtu",
        /// The kernel's IPVS has services, too.
        KernelIpvs => "kernel_ipvs",
        /// Frames arrived faster than the dataplane read them.
        FramesLost => "frames_lost",
        /// The ring of a network card was full.
        FramesLostByCard => "frames_lost_by_card",
        /// The reverse path filter of an interface is strict.
        ReversePath => "reverse_path",
        /// A network card merges received segments.
        Lro => "lro",
        /// The host does not forward packets, and the backend is tun.
        ForwardingOff => "forwarding_off",
        /// The host's firewall drops forwarded packets, and the backend is tun.
        ForwardPolicy => "forward_policy",
        /// The connection tracking of the host is nearly full, and the backend is tun.
        ConntrackFull => "conntrack_full",
        /// A filter may drop packets before the dataplane receives them.
        FilterBeforeDataplane => "filter_before_dataplane",
        /// A filter does not receive the packets that it names.
        FilterBypassed => "filter_bypassed",
        /// A filter may drop packets that the dataplane sends.
        FilterOfOutput => "filter_of_output",
        /// keepalived reports a problem, or has not applied a request of lvsd.
        VrrpTrouble => "vrrp_trouble",
        /// lvsd has refused its configuration file, and uses the previous configuration.
        ConfigurationRefused => "configuration_refused",
        /// The director is not ready to have virtual addresses.
        DirectorNotReady => "director_not_ready",
        /// keepalived reports a fault.
        VrrpFault => "vrrp_fault",
        /// keepalived reports nothing.
        VrrpSilent => "vrrp_silent",
        /// The dataplane uses no interface.
        NoInterface => "no_interface",
        /// An interface of the dataplane is down.
        InterfaceDown => "interface_down",
        /// The connection table is nearly full.
        TableNearlyFull => "table_nearly_full",
        /// The kernel fast path is configured and does not forward.
        FastPathOff => "fast_path_off",
        /// The connections of a peer are not replicated to this director.
        PeerBehind => "peer_behind",
        /// A peer has other services or servers.
        PeerDiffers => "peer_differs",
        /// A next hop does not answer.
        NextHop => "next_hop",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use lvs_core::api::{Conflict, Waiting};

    use super::Code;

    #[test]
    fn operating_page_has_each_doctor_code_once_and_no_other_code() {
        let manual = include_str!("../../../../../docs/operating.md");
        let table = manual.split_once("### Findings of `lvsadm doctor`");
        let (_, table) = table.expect("the section exists");
        let table = table.split("\n#").next().unwrap_or_default();
        let rows = table.lines().filter_map(|line| line.strip_prefix("| `"));
        let rows = rows.map(|row| row.split(" | ").collect::<Vec<_>>());
        let rows: Vec<Vec<&str>> = rows.collect();
        let listed: Vec<&str> = rows
            .iter()
            .map(|row| row[0].trim_end_matches('`'))
            .collect();
        let own = Code::ALL.iter().map(|code| code.name());
        let reported = Waiting::CODES.into_iter().chain(Conflict::CODES);
        // Both the dataplane and doctor report that an interface is down.
        let known: BTreeSet<&str> = own.chain(reported).collect();
        assert_eq!(listed.iter().copied().collect::<BTreeSet<_>>(), known);
        assert_eq!(listed.len(), known.len(), "{listed:?}");
        for row in &rows {
            let code = Code::ALL
                .iter()
                .find(|code| code.name() == row[0].trim_end_matches('`'));
            if let Some(code) = code {
                assert_eq!(row[1], code.describe().trim().trim_end_matches('.'));
            }
            assert!(row.len() == 3 && row[2].len() > 10, "{row:?}");
        }
    }
}

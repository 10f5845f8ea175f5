//! The rules of the nf_tables chains that hide the packets of services from the host.

use lvs_core::Protocol;

use super::nft::{Base, Batch, REG, RuleBody};
use super::sets::{
    HIDE, ICMP_ERRORS, ICMP_FRAGMENTS, ICMP_IN_TRANSIT, IpVersion, LOCAL_ADDRESSES, LOCAL_CLIENTS,
    OWN_VIPS, SERVER_ADDRESSES, SERVER_HOSTS, SERVERS, SERVICE_HOSTS, SERVICES, SHORT, VIPS,
};
use lvs_packet::parse::HEADERS;

impl IpVersion {
    /// Adds the rules of the chain that drops hidden packets.
    pub(super) fn add_rules(self, batch: &mut Batch<'_>) {
        let hide = self.name(HIDE);
        let len = self.address_len;
        // The registers after an address.
        let second = REG + len / 4;
        let third = second + 1;
        let fourth = third + 1;
        let address = |rule: &mut RuleBody<'_>, offset| {
            rule.load(Base::Network, offset, len, REG);
        };
        let short = self.name(SHORT);
        batch.add_chain(&hide);
        self.add_short_rules(&short, batch);
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.in_set(&self.name(OWN_VIPS)).drop();
        });
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.load_protocol(second)
                .load(Base::Transport, 2, 2, third)
                .in_set(&self.name(SERVICES))
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.load_protocol(second)
                .in_set(&self.name(SERVICE_HOSTS))
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            self.fragment(rule);
            address(rule, self.destination);
            rule.in_set(&self.name(VIPS)).drop();
        });
        if self.walks_to_ah() {
            batch.add_rule(&hide, |rule| {
                rule.load_protocol(REG).equal(&[Protocol::AH.0]);
                address(rule, self.destination);
                rule.in_set(&self.name(VIPS)).drop();
            });
        }
        batch.add_rule(&hide, |rule| {
            address(rule, self.destination);
            rule.in_set(&self.name(VIPS)).jump(&short);
        });
        batch.add_rule(&hide, |rule| {
            self.icmp_error(rule);
            address(rule, self.destination);
            rule.in_set(&self.name(VIPS)).drop();
        });
        // Hide the answers of servers to other hosts, and to the local addresses of full NAT.
        let to_others = |rule: &mut RuleBody<'_>| {
            rule.not_for_host();
        };
        let to_local = |rule: &mut RuleBody<'_>| {
            address(rule, self.destination);
            rule.in_set(&self.name(LOCAL_ADDRESSES));
        };
        self.add_answers(batch, [SERVERS, SERVER_HOSTS, SERVER_ADDRESSES], to_others);
        self.add_answers(batch, [SERVICES, SERVICE_HOSTS, VIPS], to_others);
        self.add_answers(batch, [SERVERS, SERVER_HOSTS, SERVER_ADDRESSES], to_local);
        batch.add_rule(&hide, |rule| {
            self.fragment(rule);
            self.load_fragmented_protocol(rule);
            rule.in_set(&self.name(ICMP_FRAGMENTS))
                .not_for_host()
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            rule.load_protocol(REG)
                .in_set(&self.name(ICMP_IN_TRANSIT))
                .not_for_host()
                .drop();
        });
        batch.add_rule(&hide, |rule| {
            address(rule, self.source);
            rule.load_protocol(second)
                .load(Base::Transport, 0, 2, third)
                .load(Base::Network, self.destination, len, fourth)
                .load(Base::Transport, 2, 2, fourth + len / 4)
                .in_set(&self.name(LOCAL_CLIENTS))
                .drop();
        });
    }

    /// Hides packets from the endpoints in the sets `one_port` and `all_ports`, fragments from
    /// `addresses` (with IPv6, also packets with AH), and ICMP errors about packets to `addresses`.
    /// `concerns` adds a further condition to each rule.
    fn add_answers(
        self,
        batch: &mut Batch<'_>,
        [one_port, all_ports, addresses]: [&str; 3],
        concerns: impl Fn(&mut RuleBody<'_>),
    ) {
        let hide = self.name(HIDE);
        let len = self.address_len;
        let second = REG + len / 4;
        batch.add_rule(&hide, |rule| {
            rule.load(Base::Network, self.source, len, REG)
                .load_protocol(second)
                .load(Base::Transport, 0, 2, second + 1)
                .in_set(&self.name(one_port));
            concerns(rule);
            rule.drop();
        });
        batch.add_rule(&hide, |rule| {
            rule.load(Base::Network, self.source, len, REG)
                .load_protocol(second)
                .in_set(&self.name(all_ports));
            concerns(rule);
            rule.drop();
        });
        batch.add_rule(&hide, |rule| {
            self.fragment(rule);
            rule.load(Base::Network, self.source, len, REG)
                .in_set(&self.name(addresses));
            concerns(rule);
            rule.drop();
        });
        if self.walks_to_ah() {
            batch.add_rule(&hide, |rule| {
                rule.load_protocol(REG)
                    .equal(&[Protocol::AH.0])
                    .load(Base::Network, self.source, len, REG)
                    .in_set(&self.name(addresses));
                concerns(rule);
                rule.drop();
            });
        }
        batch.add_rule(&hide, |rule| {
            self.icmp_error(rule);
            // The destination of the inner packet, after 8 bytes of ICMP header. Any host may have
            // sent the error.
            rule.load(Base::Transport, 8 + self.destination, len, REG)
                .in_set(&self.name(addresses));
            concerns(rule);
            rule.drop();
        });
    }

    /// Adds the chain `short`, which drops packets without a complete transport header. An
    /// expression that loads beyond the end of a frame does not match. Padding of Ethernet frames
    /// can be loaded, so the length in the IP header is compared first. This length is 0 in the
    /// longest super-packets of the kernel.
    fn add_short_rules(self, short: &str, batch: &mut Batch<'_>) {
        const LAST: u16 = 4;
        // The IPv4 length includes the header, which has no options here.
        let (length_at, ip_header) = match self.suffix {
            '4' => (2, 20),
            _ => (4, 0),
        };
        batch.add_chain(short);
        for (protocol, header) in HEADERS {
            let protocol = [protocol.0];
            let header = u16::try_from(header).unwrap_or(u16::MAX);
            let least = header.saturating_add(ip_header);
            batch.add_rule(short, |rule| {
                rule.load_protocol(REG)
                    .equal(&protocol)
                    .load(Base::Network, length_at, 2, REG)
                    .not_equal(&[0, 0])
                    .less(&least.to_be_bytes())
                    .drop();
            });
            batch.add_rule(short, |rule| {
                rule.load_protocol(REG)
                    .equal(&protocol)
                    .load(Base::Transport, (header - LAST).into(), LAST.into(), REG)
                    .go_back();
            });
            batch.add_rule(short, |rule| {
                rule.load_protocol(REG).equal(&protocol).drop();
            });
        }
    }

    /// Whether IPVS reads past AH as an extension header, while nf_tables takes it for the
    /// protocol.
    fn walks_to_ah(self) -> bool {
        self.suffix == '6'
    }

    fn fragment(self, rule: &mut RuleBody<'_>) {
        match self.suffix {
            // The "more fragments" flag, or an offset.
            '4' => rule
                .load(Base::Network, 6, 2, REG)
                .mask(&[0x3f, 0xff])
                .not_equal(&[0, 0]),
            _ => rule.has_fragment_header(),
        };
    }

    /// Loads the protocol of a fragment's datagram.
    fn load_fragmented_protocol(self, rule: &mut RuleBody<'_>) {
        match self.suffix {
            '4' => rule.load_protocol(REG),
            _ => rule.load_next_header_of_fragment(),
        };
    }

    fn icmp_error(self, rule: &mut RuleBody<'_>) {
        rule.load_protocol(REG)
            .equal(&[self.icmp])
            .load(Base::Transport, 0, 1, REG);
        match self.suffix {
            '4' => rule.in_set(ICMP_ERRORS),
            // Messages with the high bit are not errors (RFC 4443, 2.1).
            _ => rule.mask(&[0x80]).equal(&[0]),
        };
    }
}

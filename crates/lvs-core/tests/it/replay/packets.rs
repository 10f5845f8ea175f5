//! Packets, and what became of them.

use super::*;

impl Replay<'_> {
    pub(super) fn wait(&mut self, step: &Value) {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a few hours"
        )]
        let nanos = (step["seconds"].as_f64().expect("seconds") * 1e9).round() as u64;
        self.now = Instant::from_nanos(self.now.as_nanos() + nanos);
        self.director.advance(self.now);
        if step.get("state").is_some() {
            self.state_step(step, None);
        }
    }

    /// Where a packet goes, as recordings write it.
    pub(super) fn target(&self, verdict: &Verdict, dst: SocketAddr) -> Option<SocketAddr> {
        let Verdict::Forward(forward) = verdict else {
            return None;
        };
        if forward.method == Forwarding::Nat {
            return Some(forward.target);
        }
        // Packets that keep their port are shown with the port that is configured for the server.
        let server = forward.server?;
        let mut records = self.director.control.endpoints();
        let (_, record) = records.find(|(_, record)| record.id() == server)?;
        let port = match record.addr().port() {
            0 => dst.port(),
            port => port,
        };
        Some(SocketAddr::new(record.addr().ip(), port))
    }

    pub(super) fn reply_name(
        verdict: &Verdict,
        protocol: Protocol,
        dst: SocketAddr,
    ) -> &'static str {
        match verdict {
            Verdict::Unreachable(_) if dst.is_ipv6() => "icmp6-port-unreachable",
            Verdict::Unreachable(_) => "icmp-port-unreachable",
            Verdict::Accept(_) if protocol == Protocol::TCP => "tcp-rst",
            Verdict::Accept(_) if protocol == Protocol::SCTP => "local-stack",
            Verdict::Accept(_) if dst.is_ipv6() => "icmp6-port-unreachable",
            Verdict::Accept(_) => "icmp-port-unreachable",
            _ => "nothing",
        }
    }

    pub(super) fn connect(&mut self, step: &Value) {
        let proto = step.get("proto").unwrap_or(&self.case["proto"]);
        let tuple = Tuple {
            protocol: protocol(proto),
            src: addr(&step["client"]),
            dst: step.get("dst").map_or_else(|| self.vip(), addr),
        };
        let payload = step["payload"].as_str().unwrap_or("x").as_bytes();
        let transport = match tuple.protocol {
            Protocol::TCP => Transport::Tcp(TcpFlags(TcpFlags::SYN)),
            Protocol::UDP => Transport::Udp(payload),
            _ => panic!("connect is for TCP and UDP"),
        };
        let verdict = self.packet(Hook::Local, tuple, transport, 40);
        let text = |target: Option<SocketAddr>| {
            target.map_or("nowhere".into(), |target| target.to_string())
        };
        let expected = step["expect"].as_str().map(|_| addr(&step["expect"]));
        let got = self.target(&verdict, tuple.dst);
        if self.is_random() {
            if let Verdict::Forward(forward) = verdict {
                let mut records = self.director.control.endpoints();
                let chosen = records.find(|(_, record)| Some(record.id()) == forward.server);
                let weight = chosen.map_or(0, |(_, server)| server.weight());
                drop(records);
                self.compare("weight above 0", &true, &(weight > 0));
            }
        } else {
            self.compare("server", &text(expected), &text(got));
        }
        if let Some(reply) = step["reply"].as_str()
            && !self.unrecorded.contains(&"reply")
            && !self.is_random()
        {
            let got = Self::reply_name(&verdict, tuple.protocol, tuple.dst);
            self.compare("reply", reply, got);
        }
        if step["to"] == "ESTABLISHED" && matches!(verdict, Verdict::Forward(_)) {
            let ack = Transport::Tcp(TcpFlags(TcpFlags::ACK));
            let _ = self.packet(Hook::Local, tuple, ack, 40);
        }
    }

    /// Where connections go is drawn by lot.
    pub(super) fn is_random(&self) -> bool {
        let list = self.case["nondeterministic"].as_array();
        list.is_some_and(|list| list.iter().any(|what| what == "expect"))
    }

    pub(super) fn burst(&mut self, step: &Value) {
        let dst = step.get("dst").map_or_else(|| self.vip(), addr);
        let client = addr(&step["client"]);
        let tcp = self.case["proto"] == "tcp";
        let mut counts: BTreeMap<String, i64> = BTreeMap::new();
        let count = number(step, "count").expect("count");
        for n in 0..u32::try_from(count).expect("a count") {
            let moved = |base: SocketAddr| {
                let ip = match base.ip() {
                    IpAddr::V4(ip) => IpAddr::V4((ip.to_bits() + n).into()),
                    IpAddr::V6(ip) => IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() + u128::from(n))),
                };
                SocketAddr::new(ip, base.port())
            };
            let by_client = step["step"] == "client";
            let tuple = Tuple {
                protocol: if tcp { Protocol::TCP } else { Protocol::UDP },
                src: if by_client { moved(client) } else { client },
                dst: if by_client { dst } else { moved(dst) },
            };
            let transport = if tcp {
                Transport::Tcp(TcpFlags(TcpFlags::SYN))
            } else {
                Transport::Udp(b"x")
            };
            let verdict = self.packet(Hook::Local, tuple, transport, 40);
            let target = self.target(&verdict, tuple.dst);
            let name = target.map_or("none".into(), |target| target.to_string());
            *counts.entry(name).or_default() += 1;
        }
        let recorded: BTreeMap<String, i64> = step["expect"]
            .as_object()
            .expect("counts")
            .iter()
            .map(|(name, count)| (name.clone(), count.as_i64().expect("a count")))
            .collect();
        if self.case["scheduler"] != "twos" {
            self.compare("burst", &format!("{recorded:?}"), &format!("{counts:?}"));
            return;
        }
        // Random by design. Both are samples of one distribution: servers that got nothing get
        // nothing, and shares agree within six standard deviations.
        for name in recorded
            .keys()
            .chain(counts.keys())
            .cloned()
            .collect::<Vec<_>>()
        {
            let get = |counts: &BTreeMap<String, i64>| counts.get(&name).copied().unwrap_or(0);
            let (kernel, ours) = (get(&recorded), get(&counts));
            let spread = 36 * (kernel + ours).max(8);
            if (kernel - ours).pow(2) > spread {
                self.mismatch(&name, kernel, ours);
            }
        }
    }

    /// A recorded frame.
    pub(super) fn frame(&mut self, step: &Value) {
        let frame = frames::hex(&step["frame"]);
        let vips: Vec<IpAddr> = self
            .services
            .iter()
            .filter_map(|key| match key {
                ServiceKey::Address { addr, .. } => Some(addr.ip()),
                ServiceKey::Mark { .. } => None,
            })
            .collect();
        let mut local = self.local.clone();
        // Marked packets can be local wherever they go.
        if self.case["config"].get("rules").is_some() {
            local.extend(self.marks.iter().map(|mark| (mark.net, mark.bits)));
        }
        let hook = |dst: IpAddr| {
            let within = |&(net, bits): &(IpAddr, u32)| in_prefix(net, bits, dst);
            if vips.contains(&dst) || local.iter().any(within) {
                Hook::Local
            } else {
                Hook::Transit
            }
        };
        match frames::parse(&frame, hook, 0) {
            frames::Frame::Packet(tuple, header, len) => {
                // The host drops what seems to come from an address of its own.
                let martian = tuple.src.is_ipv4() && vips.contains(&tuple.src.ip());
                if martian && self.case["config"].get("hostsysctl").is_none() {
                    return;
                }
                let hook = hook(tuple.dst.ip());
                let segment = header.segment();
                let verdict = self.packet_with(hook, tuple, header.transport(), segment, len);
                self.answer(&verdict, tuple, header.transport(), hook);
                self.went(step, &verdict);
            }
            frames::Frame::Icmp(error) => {
                let verdict = self.director.handle_icmp_error(&error, self.now);
                self.went(step, &verdict);
            }
            frames::Frame::Other(_) => {}
        }
    }

    /// The host answers a segment that is left to it with a reset, which passes the director.
    pub(super) fn answer(
        &mut self,
        verdict: &Verdict,
        tuple: Tuple,
        transport: Transport<'_>,
        hook: Hook,
    ) {
        let delivered = match verdict {
            Verdict::Accept(_) => true,
            Verdict::Forward(forward) => forward.method == Forwarding::Local,
            _ => false,
        };
        if let (true, Transport::Tcp(flags), Hook::Local) = (delivered, transport, hook)
            && !flags.has(TcpFlags::RST)
        {
            let answer = Tuple {
                src: tuple.dst,
                dst: tuple.src,
                ..tuple
            };
            let reset = Transport::Tcp(TcpFlags(TcpFlags::RST));
            let _ = self.packet(Hook::Output, answer, reset, 40);
        }
    }

    /// Whether a frame left on the side that the recording shows.
    pub(super) fn went(&mut self, step: &Value, verdict: &Verdict) {
        if self.case.get("datagrams").is_some() {
            return;
        }
        let out = step["out"].as_array().expect("out");
        let expected = match out.first().and_then(|frame| frame["dev"].as_str()) {
            Some("sv") => "sv",
            Some("cl") => "cl",
            _ => "nowhere",
        };
        let got = match verdict {
            // A packet to a server may fail on the way: time to live, size.
            Verdict::Forward(_) if expected != "nowhere" && step["dev"] == "cl" => expected,
            Verdict::Forward(_) => "sv",
            Verdict::Reply(_) | Verdict::Unreachable(_) | Verdict::Reset(_) => "cl",
            Verdict::Accept(_) => expected,
            Verdict::Drop(_) => "nowhere",
        };
        self.compare("interface", expected, got);
    }

    /// One packet of a connection.
    pub(super) fn packet_step(&mut self, step: &Value) {
        let client = step.get("client").unwrap_or(&self.case["client"]);
        let client = addr(client);
        let vip = self.vip();
        let protocol = protocol(&self.case["proto"]);
        let len = u32::try_from(number(step, "len").unwrap_or(0)).expect("a length");
        let transport = match protocol {
            Protocol::TCP => Transport::Tcp(tcp_flags(step["flags"].as_str().expect("flags"))),
            Protocol::UDP => Transport::Udp(b"x"),
            _ => Transport::Sctp(SctpChunk {
                first: chunk_type(step["chunk"].as_str().expect("chunk")),
                abort_follows: false,
            }),
        };
        let from_server = step["dir"] == "s2c";
        let (hook, src, dst) = if from_server {
            let server = match step.get("from") {
                Some(from) => addr(from),
                None if self.case["forward"] == "masq" => match self.last_server {
                    Some(server) => server,
                    None => sockaddr(&self.case["destinations"][0]),
                },
                None => vip,
            };
            (Hook::Transit, server, client)
        } else {
            (Hook::Local, client, vip)
        };
        let tuple = Tuple { protocol, src, dst };
        let verdict = self.packet(hook, tuple, transport, 40 + len);
        let forwarded = match verdict {
            Verdict::Forward(_) => "server",
            Verdict::Reply(_) => "client",
            Verdict::Accept(_) if from_server => "client",
            _ => "nowhere",
        };
        self.compare(
            "forwarded",
            step["forwarded"].as_str().unwrap_or("nowhere"),
            forwarded,
        );
        if let Some(source) = step.get("source").filter(|source| source.is_string()) {
            let got = match verdict {
                Verdict::Reply(reply) => reply.source.unwrap_or(src),
                _ => src,
            };
            self.compare("source", &addr(source), &got);
        }
        if let Some(reply) = step["reply"].as_str() {
            self.compare("reply", reply, Self::reply_name(&verdict, protocol, dst));
        }
        self.answer(&verdict, tuple, transport, hook);
        // A connection that the packet replaces or expires is removed a tick later.
        self.director.advance(self.now);
        self.state_step(step, Some(client));
    }

    /// Compares the entries of the client with what is recorded.
    pub(super) fn state_step(&mut self, step: &Value, client: Option<SocketAddr>) {
        let client =
            client.unwrap_or_else(|| addr(step.get("client").unwrap_or(&self.case["client"])));
        let mut entries: Vec<Connection> = self
            .director
            .shard
            .connections_from(0, self.now)
            .filter(|conn| conn.client == client && !conn.template)
            .collect();
        if let Some(entry) = entries.first() {
            self.last_server = Some(entry.server);
        }
        let waited = step["op"] == "wait";
        let mut recorded: Vec<&Value> = match step["entries"].as_array() {
            Some(list) => list.iter().collect(),
            None if step["state"].is_string() => vec![step],
            None => Vec::new(),
        };
        let key = |state: &str, dest: SocketAddr, expires: u64| (state.to_owned(), dest, expires);
        entries.sort_by_key(|conn| key(conn.state, conn.server, listed_seconds(conn.expires)));
        recorded.sort_by_key(|entry| {
            let dest = match entry.get("dest").filter(|dest| dest.is_string()) {
                Some(dest) => addr(dest),
                None => SocketAddr::from(([0; 4], 0)),
            };
            key(
                entry["state"].as_str().unwrap_or(""),
                dest,
                entry["expires"].as_u64().unwrap_or(0),
            )
        });
        let states = |list: &mut dyn Iterator<Item = &str>| list.collect::<Vec<_>>().join(" ");
        self.compare(
            "state",
            &states(&mut recorded.iter().filter_map(|entry| entry["state"].as_str())),
            &states(&mut entries.iter().map(|conn| conn.state)),
        );
        if recorded.len() == entries.len() {
            for (kernel, ours) in recorded.iter().zip(&entries) {
                if let Some(dest) = kernel.get("dest").filter(|dest| dest.is_string()) {
                    self.compare("dest", &addr(dest), &ours.server);
                }
                if let Some(timeout) = kernel["timeout"].as_u64()
                    && !waited
                {
                    self.compare("timeout", &timeout, &listed_seconds(ours.expires));
                }
                if let Some(kernel) = kernel["expires"].as_u64() {
                    let ours = listed_seconds(ours.expires);
                    if kernel > ours || kernel + 1 < ours {
                        self.mismatch("expires", kernel, ours);
                    }
                }
            }
        }
        let servers: Vec<_> = self
            .services
            .iter()
            .flat_map(|key| self.servers(key))
            .collect();
        let sums: [(&str, Count); 2] = [("active", Server::active), ("inactive", Server::inactive)];
        for (what, count) in sums {
            if let Some(expected) = step[what].as_u64() {
                let got: u32 = servers.iter().map(|server| count(server)).sum();
                self.compare(what, &expected, &got.into());
            }
        }
    }
}

fn tcp_flags(letters: &str) -> TcpFlags {
    let bit = |letter| match letter {
        'F' => 0x01,
        'S' => 0x02,
        'R' => 0x04,
        'P' => 0x08,
        'A' => 0x10,
        'U' => 0x20,
        'E' => 0x40,
        'C' => 0x80,
        other => panic!("flag {other}"),
    };
    TcpFlags(letters.chars().fold(0, |bits, letter| bits | bit(letter)))
}

fn chunk_type(name: &str) -> u8 {
    match name {
        "DATA" => 0,
        "INIT" => 1,
        "INIT_ACK" | "INIT-ACK" => 2,
        "SACK" => 3,
        "HEARTBEAT" => 4,
        "HEARTBEAT_ACK" | "HEARTBEAT-ACK" => 5,
        "ABORT" => 6,
        "SHUTDOWN" => 7,
        "SHUTDOWN_ACK" | "SHUTDOWN-ACK" => 8,
        "ERROR" => 9,
        "COOKIE_ECHO" | "COOKIE-ECHO" => 10,
        "COOKIE_ACK" | "COOKIE-ACK" => 11,
        "CWR" => 13,
        "SHUTDOWN_COMPLETE" | "SHUTDOWN-COMPLETE" => 14,
        other => panic!("chunk {other}"),
    }
}

//! Recorded listings and counters: connections, statistics, files of /proc, ipvsadm.

use super::*;

impl Replay<'_> {
    pub(super) fn counts(&mut self, step: &Value) {
        let servers = self.servers(&self.service(step));
        let order: Vec<String> = servers
            .iter()
            .map(|server| server.addr().to_string())
            .collect();
        self.compare("order", &step["order"], &order.into());
        let columns: [(&str, Count); 3] = [
            ("active", Server::active),
            ("inactive", Server::inactive),
            ("persistent", Server::templates),
        ];
        let random = self.is_random();
        // Where the kernel's lots sent connections, ours did not: sums agree while all servers are
        // there and take all.
        let steps = &self.case["steps"].as_array().expect("steps")[..self.step];
        let limited = |value: &Value| number(value, "upper").is_some_and(|upper| upper > 0);
        let servers_now = self.case["destinations"].as_array();
        let incomparable = steps
            .iter()
            .any(|step| matches!(step["op"].as_str(), Some("del" | "close")) || limited(step))
            || servers_now.is_some_and(|servers| servers.iter().any(limited));
        for (what, count) in columns {
            let Some(expected) = step.get(what) else {
                continue;
            };
            if random && incomparable {
                continue;
            }
            if random {
                let sum = |counts: &mut dyn Iterator<Item = i64>| counts.sum::<i64>();
                let kernel = sum(&mut expected
                    .as_object()
                    .expect("counts")
                    .values()
                    .filter_map(Value::as_i64));
                let ours = sum(&mut servers.iter().map(|server| count(server).into()));
                self.compare(what, &kernel, &ours);
            } else {
                let got: serde_json::Map<_, _> = servers
                    .iter()
                    .map(|server| (server.addr().to_string(), Value::from(count(server))))
                    .collect();
                self.compare(what, expected, &got.into());
            }
        }
    }

    /// Connections and templates.
    pub(super) fn entries(&self) -> Vec<(Connection, Option<String>)> {
        let director = &self.director;
        let connections = director
            .shard
            .connections_from(0, self.now)
            .map(|conn| (conn, None));
        let templates = director
            .control
            .templates_from(0, self.now)
            .map(|template| {
                let engine = director.control.template_engine(template.id);
                let engine =
                    engine.map(|(name, data)| format!("{name} {}", String::from_utf8_lossy(data)));
                (template, engine)
            });
        connections.chain(templates).collect()
    }

    pub(super) fn conns(&mut self, step: &Value) {
        let nodest = self.director.control.sysctls().expire_nodest_conn;
        let configured: Vec<SocketAddr> = self
            .services
            .iter()
            .flat_map(|key| self.servers(key))
            .map(|server| server.addr())
            .collect();
        let shown = |dest: SocketAddr| {
            !nodest
                || configured.iter().any(|server| {
                    server.ip() == dest.ip()
                        && (server.port() == dest.port() || server.port() == 0 || dest.port() == 0)
                })
        };
        let with_origin = step["entries"]
            .as_array()
            .is_some_and(|entries| entries.iter().any(|entry| entry.get("origin").is_some()));
        let name = |protocol: Protocol| match protocol {
            Protocol(0) => "IP".to_owned(),
            Protocol(n @ (50 | 51)) => format!("IP_{n}"),
            protocol => protocol.to_string(),
        };
        let mut ours: Vec<(String, u64, bool)> = self
            .entries()
            .iter()
            .filter(|(conn, _)| shown(conn.server))
            .map(|(conn, engine)| {
                let origin = match (with_origin, conn.synced) {
                    (false, _) => "",
                    (true, true) => "SYNC",
                    (true, false) => "LOCAL",
                };
                let text = format!(
                    "{} {} {} {} {} {} {origin}",
                    name(conn.protocol),
                    conn.client,
                    conn.virt,
                    conn.server,
                    conn.state,
                    engine.as_deref().unwrap_or("")
                );
                (text, listed_seconds(conn.expires), conn.template)
            })
            .collect();
        let mut kernel: Vec<(String, Option<u64>)> = step["entries"]
            .as_array()
            .expect("entries")
            .iter()
            .filter(|entry| shown(addr(&entry["dest"])))
            .map(|entry| {
                let text = format!(
                    "{} {} {} {} {} {} {}",
                    entry["proto"].as_str().expect("proto"),
                    addr(&entry["client"]),
                    addr(&entry["virtual"]),
                    addr(&entry["dest"]),
                    entry["state"].as_str().expect("state"),
                    entry["pe"].as_str().unwrap_or(""),
                    entry["origin"].as_str().unwrap_or("")
                );
                (text, entry["expires"].as_u64())
            })
            .collect();
        ours.sort();
        kernel.sort();
        let texts =
            |list: &mut dyn Iterator<Item = &String>| list.cloned().collect::<Vec<_>>().join("\n");
        let (kernels, oursies) = (
            texts(&mut kernel.iter().map(|entry| &entry.0)),
            texts(&mut ours.iter().map(|entry| &entry.0)),
        );
        if kernels != oursies {
            let only = |a: &str, b: &str| {
                let mut b: Vec<&str> = b.lines().collect();
                let mut only = Vec::new();
                for line in a.lines() {
                    match b.iter().position(|other| *other == line) {
                        Some(at) => drop(b.swap_remove(at)),
                        None => only.push(line.to_owned()),
                    }
                }
                format!("{only:?}")
            };
            let (a, b) = (only(&kernels, &oursies), only(&oursies, &kernels));
            self.mismatch("entries", a, b);
            return;
        }
        if self.unrecorded.contains(&"expires") {
            return;
        }
        for ((text, kernel), (_, ours, template)) in kernel.into_iter().zip(ours) {
            // The kernel's timers fire late, so a template that ran out while it controlled
            // connections was armed again
            let late = if template { 1 + (60 * 4 + 600) / 8 } else { 1 };
            if let Some(kernel) = kernel
                && !(ours.saturating_sub(1)..=ours + late).contains(&kernel)
                && !(ours == 0 && kernel == u64::from(u32::MAX) / 1000)
            {
                self.mismatch(&format!("expires of {text}"), kernel, ours);
            }
        }
    }

    /// Counters or rates.
    pub(super) fn stats(&mut self, step: &Value) {
        let rates = step["op"] == "rates";
        let control = &self.director.control;
        let json = |stats: lvs_core::Stats| {
            let counts = if rates { stats.rates } else { stats.shown };
            let names = if rates {
                ["cps", "inpps", "outpps", "inbps", "outbps"]
            } else {
                ["conns", "inpkts", "outpkts", "inbytes", "outbytes"]
            };
            let values = [
                counts.conns,
                counts.in_packets,
                counts.out_packets,
                counts.in_bytes,
                counts.out_bytes,
            ];
            let pairs = names
                .into_iter()
                .map(String::from)
                .zip(values.map(Value::from));
            Value::Object(pairs.collect())
        };
        let what = if rates { "rates" } else { "stats" };
        let mut pairs = Vec::new();
        if let Some(total) = step.get("total") {
            pairs.push((
                "total".to_owned(),
                total.clone(),
                json(control.total_stats()),
            ));
        }
        for recorded in step["services"].as_array().into_iter().flatten() {
            let key = service_key(&recorded["service"], &Value::Null);
            let Some(service) = control.service(&key) else {
                pairs.push((key.to_string(), recorded.clone(), Value::Null));
                continue;
            };
            pairs.push((
                key.to_string(),
                recorded[what].clone(),
                json(service.stats()),
            ));
            let Some(destinations) = recorded["destinations"].as_array() else {
                continue;
            };
            let addrs = |list: &mut dyn Iterator<Item = SocketAddr>| {
                list.map(|addr| addr.to_string()).collect::<Vec<_>>().into()
            };
            pairs.push((
                format!("servers of {key}"),
                addrs(&mut destinations.iter().map(sockaddr)),
                addrs(&mut service.servers().iter().map(|server| server.addr())),
            ));
            for (recorded, server) in destinations.iter().zip(service.servers()) {
                let stats = control.server_stats(server.id()).unwrap_or_default();
                pairs.push((
                    server.addr().to_string(),
                    recorded[what].clone(),
                    json(stats),
                ));
                for (what, count) in [("active", server.active()), ("inactive", server.inactive())]
                {
                    if let Some(expected) = recorded.get(what) {
                        let name = format!("{what} of {}", server.addr());
                        pairs.push((name, expected.clone(), count.into()));
                    }
                }
            }
        }
        for (name, kernel, ours) in pairs {
            self.compare(&name, &kernel, &ours);
        }
    }

    /// Text of a file in /proc: the order of services and connections is that of a hash table, and
    /// timers are late.
    pub(super) fn proc(&mut self, step: &Value) {
        let (control, shard) = (&self.director.control, &self.director.shard);
        let mut text = String::new();
        let path = step["path"].as_str().expect("path");
        match path {
            "/proc/net/ip_vs" => lvs_core::proc::services(&mut text, control, 4096),
            "/proc/net/ip_vs_conn" => {
                lvs_core::proc::connections(&mut text, control, shard, self.now)
            }
            "/proc/net/ip_vs_conn_sync" => {
                lvs_core::proc::connections_sync(&mut text, control, shard, self.now)
            }
            "/proc/net/ip_vs_stats" => lvs_core::proc::stats(&mut text, control),
            "/proc/net/ip_vs_stats_percpu" => lvs_core::proc::stats_percpu(&mut text, control),
            other => panic!("unknown file {other}"),
        }
        .expect("a string takes everything");
        let recorded = step["text"].as_str().expect("text");
        let connections = path.contains("conn");
        let blocks = |text: &str| {
            // A service with its servers, or a connection without the number of seconds, whose
            // width still counts.
            let mut blocks: Vec<String> = Vec::new();
            for line in text.lines() {
                let mut line = line.to_owned();
                if connections && !line.starts_with("Pro ") {
                    let digits = line.trim_end_matches(|c: char| c.is_ascii_digit()).len();
                    let width = line.len();
                    line.truncate(digits);
                    line.push_str(&" ".repeat(width - digits));
                }
                match blocks.last_mut() {
                    Some(block) if path == "/proc/net/ip_vs" && line.starts_with("  -> 0") => {
                        block.push('\n');
                        block.push_str(&line);
                    }
                    _ => blocks.push(line),
                }
            }
            if connections || path == "/proc/net/ip_vs" {
                let header = if connections { 1 } else { 3 };
                blocks[header..].sort();
            }
            blocks.join("\n")
        };
        self.compare(path, &blocks(recorded), &blocks(&text));
    }

    /// Operations that the recorder made with ipvsadm.
    pub(super) fn ipvsadm(&mut self, step: &Value) -> Result<(), Error> {
        let words: Vec<&str> = match &step["args"] {
            Value::String(line) => line.split_whitespace().collect(),
            list => list
                .as_array()
                .expect("arguments")
                .iter()
                .filter_map(Value::as_str)
                .collect(),
        };
        let value = |flag: &str| {
            let at = words.iter().position(|word| *word == flag)?;
            words.get(at + 1).copied()
        };
        let key = |_: ()| {
            let parse = |text: &str| text.parse::<SocketAddr>().expect("an address");
            if let Some(addr) = value("-t") {
                ServiceKey::tcp(parse(addr))
            } else if let Some(addr) = value("-u") {
                ServiceKey::udp(parse(addr))
            } else if let Some(addr) = value("--sctp-service") {
                ServiceKey::Address {
                    protocol: Protocol::SCTP,
                    addr: parse(addr),
                }
            } else {
                ServiceKey::Mark {
                    family: if words.contains(&"-6") {
                        Family::V6
                    } else {
                        Family::V4
                    },
                    mark: value("-f").expect("a service").parse().expect("a mark"),
                }
            }
        };
        let server = |_: ()| -> SocketAddr {
            let text = value("-r").expect("a server");
            text.parse()
                .unwrap_or_else(|_| SocketAddr::new(text.parse().expect("an address"), 0))
        };
        let forwarding = if words.contains(&"-m") {
            Forwarding::Nat
        } else if words.contains(&"-i") {
            Forwarding::Tunnel
        } else {
            Forwarding::Route
        };
        let weight = value("-w").map_or(1, |text| text.parse().expect("a weight"));
        let config = ServerConfig::new(weight, forwarding);
        let control = &mut self.director.control;
        match words[0] {
            "-A" | "-E" => {
                let key = key(());
                let mut config = ServiceConfig::new(key.family(), value("-s").unwrap_or("wlc"));
                if let Some(timeout) = value("-p") {
                    config.timeout = timeout.parse().expect("seconds");
                    config.flags.0 |= ServiceFlags::PERSISTENT;
                }
                if words[0] == "-A" {
                    control.add_service(key, config, None)?;
                    self.services.push(key);
                } else {
                    control.edit_service(&key, config, None)?;
                }
            }
            "-D" => {
                let key = key(());
                control.delete_service(&key, self.now)?;
                self.services.retain(|other| *other != key);
            }
            "-C" => {
                control.flush(self.now);
                self.services.clear();
            }
            "-a" => control.add_server(&key(()), server(()), &config, self.now)?,
            "-e" => control.edit_server(&key(()), server(()), &config)?,
            "-d" => control.delete_server(&key(()), server(()), self.now)?,
            "--set" => {
                let number = |at: usize| words[at].parse().expect("seconds");
                control.set_timeouts(number(1), number(2), number(3))?;
            }
            list if list.starts_with("-L") => {}
            other => panic!("ipvsadm {other}"),
        }
        Ok(())
    }
}

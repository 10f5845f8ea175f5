//! Random command lines of ipvsadm, most of them valid.

use serde_json::{Value, json};

use crate::hostile::Entropy;

const SESSION: u64 = 100;
/// On average, one of `STRAY` command lines has a further random option, which may not belong to
/// its command.
const STRAY: usize = 12;

/// The hosts file of every session.
const HOSTS: &str = "\
127.0.0.1 localhost
::1 localhost
10.0.77.1 www.example.test www
10.0.77.2 mail.example.test
10.1.77.1 rs1.example.test rs1
10.1.77.2 rs2.example.test
fd00:0:77::1 www6.example.test
fd00:1::77:1 rs6.example.test
";

/// Addresses of services. For these, ipvsadm's sort order is transitive; for arbitrary addresses,
/// it is not.
const VIRTUAL: [&str; 22] = [
    "10.0.0.1:80",
    "10.0.0.1:443",
    "10.0.0.1:0",
    "10.0.0.1",
    "10.0.0.2:53",
    "10.0.0.2:http",
    "192.168.0.1:80",
    "192.168.0.1:21",
    "www:80",
    "www.example.test:https",
    "mail.example.test:smtp",
    "mail.example.test:tcpmux",
    "www6.example.test:80",
    "[fd00::1]:80",
    "[fd00::1]:0",
    "[2001:db8::80]:443",
    "[fd00::2]:mysql",
    "fd00::3",
    "0.0.0.0:80",
    "10.0.0.1:65536",
    "10.0.0.256:80",
    "bad",
];

const REAL: [&str; 20] = [
    "10.1.0.1:80",
    "10.1.0.2:8080",
    "10.1.0.3",
    "10.1.0.4:0",
    "10.1.0.5:ftp",
    "192.168.3.4:80",
    "rs1:80",
    "rs2.example.test:http",
    "rs1",
    "127.0.0.1:80",
    "[fd00:1::1]:80",
    "[fd00:1::2]:8080",
    "fd00:1::3",
    "rs6.example.test:80",
    "224.0.0.5:80",
    "255.255.255.255:80",
    "10.1.0.1:-1",
    "[fd00:1::1]",
    "bad",
    "",
];

const NUMBERS: [&str; 22] = [
    "0",
    "1",
    "2",
    "5",
    "7",
    "80",
    "100",
    "255",
    "256",
    "300",
    "6080",
    "65535",
    "65536",
    "100000",
    "2147483647",
    "2147483648",
    "4294967295",
    "4294967296",
    "-1",
    "0x10",
    "007",
    "1k",
];

const SCHEDULERS: [&str; 18] = [
    "rr", "wrr", "lc", "wlc", "lblc", "lblcr", "dh", "sh", "sed", "nq", "fo", "ovf", "mh", "twos",
    "none", "RR", "nosuch", "",
];

const FLAGS: [&str; 12] = [
    "sh-port",
    "sh-fallback",
    "sh-fallback,sh-port",
    "mh-port",
    "mh-fallback",
    "mh-fallback,mh-port",
    "flag-1",
    "flag-2",
    "flag-3",
    "flag-1,flag-2,flag-3",
    "flag-4",
    "sh-port,nosuch",
];

/// The sessions of `seed`, with `commands` command lines in total.
pub(super) fn sessions(seed: u64, commands: u64) -> Vec<Value> {
    (0..commands.div_ceil(SESSION))
        .map(|number| {
            let entropy = Entropy::seeded(seed.wrapping_mul(0x9e37_79b9).wrapping_add(number));
            let mut lines = Lines { entropy };
            let count = SESSION.min(commands - number * SESSION);
            json!({
                "name": format!("commands-{seed}-{number}"), "seed": seed, "vips": [], "hosts": HOSTS,
                "steps": (0..count).map(|_| lines.step()).collect::<Vec<_>>(),
            })
        })
        .collect()
}

struct Lines {
    entropy: Entropy<'static>,
}

impl Lines {
    fn step(&mut self) -> Value {
        let words = match self.entropy.below(64) {
            0..=15 => self.service("-A", "--add-service"),
            16..=20 => self.service("-E", "--edit-service"),
            21..=23 => self.deletion("-D", "--delete-service"),
            24..=37 => self.server("-a", "--add-server"),
            38..=42 => self.server("-e", "--edit-server"),
            43..=45 => self.server_deletion(),
            46..=53 => self.listing(),
            54 => self.deletion("-Z", "--zero"),
            55 => self.save(),
            56 | 57 => self.timeouts(),
            58..=60 => self.daemon(),
            61 | 62 => return self.restore(),
            _ => self.nonsense(),
        };
        let unordered = words
            .iter()
            .any(|word| matches!(word.as_str(), "--nosort" | "-c" | "--connection"));
        let argv: Vec<String> = std::iter::once("ipvsadm".to_owned()).chain(words).collect();
        let mut step = json!({ "argv": argv });
        if unordered {
            step["unordered"] = true.into();
        }
        step
    }

    /// Randomly returns the short or the long form of an option.
    fn name(&mut self, short: &str, long: &str) -> String {
        if self.entropy.one_in(4) { long } else { short }.to_owned()
    }

    /// An option with a value, in a random notation.
    fn option(&mut self, short: &str, long: &str, value: &str) -> Vec<String> {
        match self.entropy.below(8) {
            0 if !short.is_empty() => vec![format!("{short}{value}")],
            1 => vec![format!("{long}={value}")],
            2 => vec![long.to_owned(), value.to_owned()],
            _ if short.is_empty() => vec![long.to_owned(), value.to_owned()],
            _ => vec![short.to_owned(), value.to_owned()],
        }
    }

    fn number(&mut self) -> &'static str {
        // Half of the values are small.
        let limit = if self.entropy.one_in(2) {
            NUMBERS.len()
        } else {
            8
        };
        NUMBERS[self.entropy.below(limit)]
    }

    fn virtual_service(&mut self) -> Vec<String> {
        if self.entropy.one_in(5) {
            let mark = self
                .entropy
                .pick(&["1", "5", "7", "7", "4294967295", "0", "x", "-1"]);
            let mut words = self.option("-f", "--fwmark-service", mark);
            if self.entropy.one_in(3) {
                words.push("-6".to_owned());
            }
            return words;
        }
        let (short, long) = self.entropy.pick(&[
            ("-t", "--tcp-service"),
            ("-t", "--tcp-service"),
            ("-u", "--udp-service"),
            ("", "--sctp-service"),
        ]);
        // Servers exist mostly for the first addresses.
        let limit = if self.entropy.one_in(3) {
            VIRTUAL.len()
        } else {
            8
        };
        let addr = VIRTUAL[self.entropy.below(limit)];
        self.option(short, long, addr)
    }

    fn real_server(&mut self) -> Vec<String> {
        let limit = if self.entropy.one_in(2) {
            REAL.len()
        } else {
            5
        };
        let addr = REAL[self.entropy.below(limit)];
        self.option("-r", "--real-server", addr)
    }

    /// Joins the command and the groups of words in random order, mostly with the command first.
    fn assemble(&mut self, command: String, mut groups: Vec<Vec<String>>) -> Vec<String> {
        if self.entropy.one_in(STRAY) {
            let stray = self.stray();
            groups.push(stray);
        }
        for at in (1..groups.len()).rev() {
            groups.swap(at, self.entropy.below(at + 1));
        }
        let at = if self.entropy.one_in(16) {
            self.entropy.below(groups.len() + 1)
        } else {
            0
        };
        groups.insert(at, vec![command]);
        groups.concat()
    }

    /// A random option, which may not belong to the command.
    fn stray(&mut self) -> Vec<String> {
        let number = self.number();
        let text = match self.entropy.below(24) {
            0 => "-n",
            1 => "--stats",
            2 => "--rate",
            3 => "--exact",
            4 => "--thresholds",
            5 => "--persistent-conn",
            6 => "--nosort",
            7 => "--sort",
            8 => "--tun-info",
            9 => "-6",
            10 => "-o",
            11 => "-m",
            12 => "-c",
            13 => "--timeout",
            14 => "--daemon",
            15 => return self.option("-w", "--weight", number),
            16 => return self.option("-x", "--u-threshold", number),
            17 => return self.option("-M", "--netmask", number),
            18 => return self.option("", "--syncid", number),
            19 => return self.option("", "--pe", "sip"),
            20 => return self.option("", "--mcast-ttl", number),
            21 => return self.tunnel(),
            22 => return self.virtual_service(),
            _ => return vec![number.to_owned()],
        };
        vec![text.to_owned()]
    }

    fn service(&mut self, short: &str, long: &str) -> Vec<String> {
        let command = self.name(short, long);
        let mut groups = vec![self.virtual_service()];
        if self.entropy.one_in(2) {
            let limit = if self.entropy.one_in(4) {
                SCHEDULERS.len()
            } else {
                13
            };
            let scheduler = SCHEDULERS[self.entropy.below(limit)];
            groups.push(self.option("-s", "--scheduler", scheduler));
        }
        if self.entropy.one_in(3) {
            groups.push(if self.entropy.one_in(3) {
                vec!["-p".to_owned()]
            } else {
                let seconds = self.number();
                self.option("-p", "--persistent", seconds)
            });
        }
        if self.entropy.one_in(6) {
            let mask = self.entropy.pick(&[
                "255.255.255.0",
                "255.255.255.255",
                "0.0.0.0",
                "255.0.255.0",
                "24",
                "64",
                "128",
                "129",
                "0",
                "x",
            ]);
            groups.push(self.option("-M", "--netmask", mask));
        }
        if self.entropy.one_in(5) {
            let flags = self.entropy.pick(&FLAGS);
            groups.push(self.option("-b", "--sched-flags", flags));
        }
        if self.entropy.one_in(8) {
            groups.push(vec![self.name("-o", "--ops")]);
        }
        if self.entropy.one_in(10) {
            let engine = self.entropy.pick(&["sip", "sip", "none", ""]);
            groups.push(self.option("", "--pe", engine));
        }
        self.assemble(command, groups)
    }

    fn deletion(&mut self, short: &str, long: &str) -> Vec<String> {
        let command = self.name(short, long);
        let groups = if short == "-Z" && self.entropy.one_in(2) {
            Vec::new()
        } else {
            vec![self.virtual_service()]
        };
        self.assemble(command, groups)
    }

    fn tunnel(&mut self) -> Vec<String> {
        let mut words = Vec::new();
        if !self.entropy.one_in(6) {
            let kind = self.entropy.pick(&["ipip", "gre", "gue", "gue", "x"]);
            words.extend(self.option("", "--tun-type", kind));
        }
        if self.entropy.one_in(2) {
            let port = self.number();
            words.extend(self.option("", "--tun-port", port));
        }
        if self.entropy.one_in(2) {
            let word = self
                .entropy
                .pick(&["--tun-nocsum", "--tun-csum", "--tun-remcsum"]);
            words.push(word.to_owned());
        }
        words
    }

    fn server(&mut self, short: &str, long: &str) -> Vec<String> {
        let command = self.name(short, long);
        let mut groups = vec![self.virtual_service(), self.real_server()];
        let method = self.entropy.below(5);
        match method {
            0 => groups.push(vec![self.name("-m", "--masquerading")]),
            1 => groups.push(vec![self.name("-g", "--gatewaying")]),
            2 | 3 => groups.push(vec![self.name("-i", "--ipip")]),
            _ => {}
        }
        if matches!(method, 2 | 3) && self.entropy.one_in(2) || self.entropy.one_in(12) {
            groups.push(self.tunnel());
        }
        for (short, long) in [
            ("-w", "--weight"),
            ("-x", "--u-threshold"),
            ("-y", "--l-threshold"),
        ] {
            if self.entropy.one_in(4) {
                let number = self.number();
                groups.push(self.option(short, long, number));
            }
        }
        self.assemble(command, groups)
    }

    fn server_deletion(&mut self) -> Vec<String> {
        let command = self.name("-d", "--delete-server");
        let groups = vec![self.virtual_service(), self.real_server()];
        self.assemble(command, groups)
    }

    fn listing(&mut self) -> Vec<String> {
        let command = self
            .entropy
            .pick(&["-L", "-Ln", "-L", "-l", "--list", "-ln"]);
        let mut groups = Vec::new();
        if self.entropy.one_in(4) {
            groups.push(self.virtual_service());
        }
        for option in [
            "-n",
            "--stats",
            "--rate",
            "--thresholds",
            "--persistent-conn",
            "--tun-info",
            "--exact",
            "--sort",
            "--nosort",
            "-c",
            "--timeout",
            "--daemon",
        ] {
            if self.entropy.one_in(10) {
                groups.push(vec![option.to_owned()]);
            }
        }
        self.assemble(command.to_owned(), groups)
    }

    fn save(&mut self) -> Vec<String> {
        let command = self.entropy.pick(&["-S", "-Sn", "--save"]);
        self.assemble(command.to_owned(), Vec::new())
    }

    fn timeouts(&mut self) -> Vec<String> {
        let count = self.entropy.pick(&[3, 3, 3, 3, 2, 4]);
        let numbers = (0..count).map(|_| vec![self.number().to_owned()]);
        let numbers = numbers.collect::<Vec<_>>().concat();
        let numbers = vec![numbers];
        self.assemble("--set".to_owned(), numbers)
    }

    fn daemon(&mut self) -> Vec<String> {
        let role = self
            .entropy
            .pick(&["master", "backup", "master", "backup", "both"]);
        if self.entropy.one_in(3) {
            let mut groups = Vec::new();
            if self.entropy.one_in(2) {
                let number = self.number();
                groups.push(self.option("", "--syncid", number));
            }
            let mut words = vec!["--stop-daemon".to_owned(), role.to_owned()];
            words.extend(groups.concat());
            return words;
        }
        let mut words = vec!["--start-daemon".to_owned(), role.to_owned()];
        if !self.entropy.one_in(4) {
            let link = self.entropy.pick(&["lo", "cl", "sv", "cl", "nosuch"]);
            words.extend(self.option("", "--mcast-interface", link));
        }
        for long in ["--syncid", "--sync-maxlen", "--mcast-port", "--mcast-ttl"] {
            if self.entropy.one_in(4) {
                let number = self.number();
                words.extend(self.option("", long, number));
            }
        }
        if self.entropy.one_in(5) {
            let group =
                self.entropy
                    .pick(&["224.0.0.82", "239.1.2.3", "ff02::81", "10.0.0.1", "x"]);
            words.extend(self.option("", "--mcast-group", group));
        }
        words
    }

    /// The command `ipvsadm -R`, with random lines on standard input.
    fn restore(&mut self) -> Value {
        let mut lines = Vec::new();
        for _ in 0..=self.entropy.below(5) {
            let words = match self.entropy.below(6) {
                0..=2 => self.service("-A", "--add-service"),
                3 | 4 => self.server("-a", "--add-server"),
                _ => self.deletion("-D", "--delete-service"),
            };
            lines.push(words.join(" "));
        }
        let command = self.name("-R", "--restore");
        json!({"argv": ["ipvsadm", command], "stdin": lines.join("\n") + "\n"})
    }

    fn nonsense(&mut self) -> Vec<String> {
        let words: &[&str] = match self.entropy.below(10) {
            0 => &["-C"],
            1 => &["--clear"],
            2 => &[],
            3 => &["-x"],
            4 => &["-A"],
            5 => &["-a", "-t", "10.0.0.1:80"],
            6 => &["-L", "-A"],
            7 => &["--nosuch"],
            8 => &["-Z", "-n"],
            _ => &["foo"],
        };
        words.iter().map(|&word| word.to_owned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differential_seed_reproduces_command_sessions() {
        let sessions = sessions(7, 250);
        assert_eq!(sessions, super::sessions(7, 250));
        assert_ne!(sessions, super::sessions(8, 250));
        let steps = |session: &Value| session["steps"].as_array().map_or(0, Vec::len);
        assert_eq!(sessions.iter().map(steps).sum::<usize>(), 250);
    }
}

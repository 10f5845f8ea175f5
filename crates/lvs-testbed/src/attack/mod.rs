//! Attacks on a director, and their effect on honest clients: `lvs-testbed attack NAME`.
//!
//! ```text
//!  client ────┐                                    honest: new connections and downloads, every byte checked
//!             ├── front LAN ── director ── servers
//!  attacker ──┘                                    frames out of a packet socket, at a rate, for a time
//! ```
//!
//! Each run creates its own network namespaces. The honest clients run alone first, then during the
//! attack. The dataplane's memory and counters are read before and after. `ATTACKS` lists the
//! attacks.

mod aggregates;
mod bed;
mod floods;
mod fragments;
mod frames;
mod honest;
mod land;
mod probe;
mod strike;
mod users;

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;

pub use self::bed::echo;
pub use self::honest::{Honest, HonestOptions, honest};
pub use self::probe::{Delays, ProbeOptions, probe};
use self::strike::Volley;
pub use self::strike::{StrikeOptions, Target, strike};
pub use self::users::{UserOptions, user};
use crate::site::{Forward, Site, Vip};

struct Attack {
    name: &'static str,
    summary: &'static str,
    /// The forwarding method, and the owner of the virtual address.
    site: (Forward, Vip),
    /// Command-line options of the dataplane.
    dataplane: &'static [&'static str],
    /// Default number of frames a second.
    rate: u64,
    means: Means,
    /// The documented bound on the effect of the attack.
    bound: &'static str,
    /// Drop reasons of the attack's packets. The counter of at least one must increase.
    counted: &'static [&'static str],
    /// Maximum growth of the dataplane's memory in megabytes.
    memory_mb: u64,
}

impl Attack {
    /// Whether the counter of one of the attack's reasons is above 0, or the attack has no reasons.
    fn is_counted(&self, drops: &BTreeMap<String, u64>) -> bool {
        let counted = |reason: &&str| drops.get(*reason).is_some_and(|&count| count > 0);
        self.counted.is_empty() || self.counted.iter().any(counted)
    }
}

/// The source of an attack.
enum Means {
    /// Frames on the clients' link.
    Frames(fn(&Target) -> Box<dyn Volley>),
    /// Unprivileged users of the director's host.
    Users(fn(&Site, Duration) -> Result<u64>),
    /// The dataplane logs much and `lvsadm` prints a listing, but no process reads either pipe.
    Log,
}

const SMALL: &str = "dataplane at most 128 MB above idle; no silence above 50 ms";
const SERVED: &str = "at least 99 % of honest connections served";
const EVICT: &[&str] = &["--when-full", "evict"];
/// Memory of a full table with 2^20 connections in megabytes.
const TABLE_MB: u64 = 320;

/// Default values of an attack: NAT, with the VIP on the host.
const NAT: Attack = Attack {
    name: "",
    summary: "",
    site: (Forward::Nat, Vip::Host),
    dataplane: &[],
    rate: 0,
    means: Means::Log,
    bound: SMALL,
    counted: &[],
    memory_mb: 128,
};

const ATTACKS: &[Attack] = &[
    Attack {
        name: "fragments",
        summary: "datagrams in 1,024 fragments of 8 bytes, through NAT",
        rate: 150_000,
        means: Means::Frames(|target| fragments::TinyFragments::v4(target, 7)),
        counted: &["fragment_memory"],
        ..NAT
    },
    Attack {
        name: "fragments6",
        summary: "datagrams in 1,024 fragments of 8 bytes, through NAT, over IPv6",
        rate: 150_000,
        means: Means::Frames(|target| fragments::TinyFragments::v6(target, 7)),
        counted: &["fragment_memory", "tiny_fragment"],
        ..NAT
    },
    Attack {
        name: "fragments-dr",
        summary: "datagrams in 1,024 fragments of 8 bytes, through direct routing",
        site: (Forward::Dr, Vip::Host),
        rate: 150_000,
        means: Means::Frames(|target| fragments::TinyFragments::v4(target, 7)),
        counted: &["fragment_memory"],
        ..NAT
    },
    Attack {
        name: "fragments-host",
        summary: "datagrams in 1,024 fragments of 8 bytes, to a port of the virtual address without a service",
        rate: 150_000,
        means: Means::Frames(|target| fragments::TinyFragments::v4(target, 9999)),
        counted: &["fragment_memory"],
        ..NAT
    },
    Attack {
        name: "aggregates",
        summary: "super-packets of 64 kB with segments of 1 or 48 bytes, to be segmented for a tunnel",
        site: (Forward::Tun, Vip::Host),
        rate: 1000,
        means: Means::Frames(aggregates::TinyAggregates::volley),
        counted: &["tiny_segments"],
        ..NAT
    },
    Attack {
        name: "land",
        summary: "packets from the virtual address to itself, UDP echo and TCP, IPv4 and IPv6",
        site: (Forward::Nat, Vip::Dataplane),
        rate: 2000,
        means: Means::Frames(land::Land::volley),
        bound: "no packet loops; all packets are counted",
        counted: &["martian"],
        ..NAT
    },
    Attack {
        name: "all-ports",
        summary: "SYNs from one source port to all ports of an address",
        rate: 4000,
        means: Means::Frames(floods::Packets::all_ports),
        bound: "p99 of honest clients at most twice that without the attack; no loss",
        ..NAT
    },
    Attack {
        name: "syn",
        summary: "SYNs from sources that do not exist, table of 2^20",
        dataplane: EVICT,
        rate: 200_000,
        means: Means::Frames(floods::Packets::syn),
        bound: "no established connection broken; at least 99 % of honest connections served; memory constant",
        memory_mb: TABLE_MB,
        ..NAT
    },
    Attack {
        name: "pairs",
        summary: "SYN and ACK by direct routing, from sources that do not exist, table of 2^16",
        site: (Forward::Dr, Vip::Host),
        dataplane: &["--when-full", "evict", "--max-connections", "65536"],
        rate: 24_000,
        means: Means::Frames(floods::Packets::pairs),
        bound: SERVED,
        ..NAT
    },
    Attack {
        name: "udp",
        summary: "datagrams from sources that do not exist, table of 2^16",
        dataplane: &["--when-full", "evict", "--max-connections", "65536"],
        rate: 12_000,
        means: Means::Frames(floods::Packets::udp),
        bound: SERVED,
        ..NAT
    },
    Attack {
        name: "errors",
        summary: "datagrams from one source to a port without a service, answered with ICMP errors up to a limit",
        site: (Forward::Nat, Vip::Dataplane),
        rate: 2000,
        means: Means::Frames(floods::Packets::errors),
        bound: "other hosts receive their ICMP errors",
        counted: &["own_address", "icmp_limited"],
        ..NAT
    },
    Attack {
        name: "users",
        summary: "unprivileged local users: unfinished requests of 1 MiB, and listings in a loop",
        means: Means::Users(users::hostile),
        bound: "no packet delayed by more than 5 ms; at most 64 MB",
        memory_mb: 64,
        ..NAT
    },
    Attack {
        name: "log",
        summary: "no process reads the dataplane's log (level trace, a full pipe) or a listing of lvsadm",
        bound: "packets flow; log lines are lost",
        memory_mb: 64,
        ..NAT
    },
];

fn find(name: &str) -> Result<&'static Attack> {
    let known = || {
        let names: Vec<&str> = ATTACKS.iter().map(|attack| attack.name).collect();
        format!(
            "no attack is called {name}; there are: {}",
            names.join(", ")
        )
    };
    let found = ATTACKS.iter().find(|attack| attack.name == name);
    found.with_context(known)
}

/// Names of all attacks.
pub fn names() -> impl Iterator<Item = &'static str> {
    ATTACKS.iter().map(|attack| attack.name)
}

/// Options of `lvs-testbed attack`.
#[derive(Clone, Debug, clap::Args)]
pub struct AttackOptions {
    /// Names of the attacks; none or `all` runs all of them
    pub names: Vec<String>,
    /// Duration of each attack in seconds
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Seconds for which honest clients run alone before the attack; at most the duration of the
    /// attack
    #[arg(long, default_value_t = 10)]
    pub alone: u64,
    /// Frames a second, instead of each attack's own number
    #[arg(long)]
    pub rate: Option<u64>,
    /// List the attacks
    #[arg(long)]
    pub list: bool,
    /// Print the results as JSON, one line for each attack
    #[arg(long)]
    pub json: bool,
}

/// Result of an attack.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// Name of the attack.
    pub name: &'static str,
    /// The documented bound on the effect of the attack.
    pub bound: &'static str,
    /// Results of honest clients without an attack.
    pub before: Honest,
    /// Results of honest clients during the attack.
    pub beside: Honest,
    /// Number of sent frames, of requests by local users, or of rounds of logged changes.
    pub sent: u64,
    /// The dataplane's resident memory before the first client, in kilobytes.
    pub idle_kb: u64,
    /// Peak of the dataplane's resident memory since then, in kilobytes.
    pub peak_kb: u64,
    /// Number of packets that the dataplane dropped after the honest clients had run alone, by
    /// reason.
    pub drops: BTreeMap<String, u64>,
    /// Number of UDP datagrams that the real servers received after the honest clients had run
    /// alone.
    pub echoed: u64,
    /// Delays of single packets, if local users are the attackers.
    pub delays: Option<Compared>,
}

/// Delays of single packets, with and without the attack.
#[derive(Clone, Debug, Serialize)]
pub struct Compared {
    /// Delays without other local users.
    pub before: Delays,
    /// Delays while the same number of local users only compute.
    pub busy_users: Delays,
    /// Delays during the attack.
    pub beside: Delays,
}

impl Outcome {
    /// Growth of the dataplane's memory in megabytes.
    #[must_use]
    pub const fn memory_mb(&self) -> u64 {
        self.peak_kb.saturating_sub(self.idle_kb) / 1024
    }

    /// Checks the bounds that do not depend on the speed of the machine, for example memory,
    /// counters and content of answers.
    ///
    /// # Errors
    ///
    /// The first bound that is violated.
    pub fn check(&self) -> Result<()> {
        let attack = find(self.name)?;
        ensure!(self.sent > 0, "{}: the attack sent nothing", self.name);
        ensure!(
            self.memory_mb() <= attack.memory_mb,
            "{}: the dataplane's memory grew by {} MB, the maximum is {} MB",
            self.name,
            self.memory_mb(),
            attack.memory_mb
        );
        for honest in [&self.before, &self.beside] {
            ensure!(
                honest.wrong == 0,
                "{}: an answer or a download has a wrong byte; the first error is {:?}",
                self.name,
                honest.error
            );
        }
        ensure!(
            self.beside.served > 0,
            "{}: no honest client was served",
            self.name
        );
        ensure!(
            attack.is_counted(&self.drops),
            "{}: no packet was counted for any of the reasons {:?}; counted were {:?}",
            self.name,
            attack.counted,
            self.drops
        );
        if let Some(delays) = &self.delays {
            let Delays { sent, lost, .. } = delays.beside;
            ensure!(
                lost == 0,
                "{}: {lost} of {sent} packets were lost; the dataplane dropped {:?}",
                self.name,
                self.drops
            );
        }
        if self.name == "land" {
            ensure!(
                self.echoed == 0,
                "{} datagrams reached the echo service of a server, which must not receive any",
                self.echoed
            );
        }
        Ok(())
    }
}

/// Runs honest clients alone for `alone` seconds (at most `seconds`), then together with the attack
/// for `seconds` seconds.
///
/// # Errors
///
/// The attack is unknown, the testbed cannot be set up, a program fails, or the dataplane exits.
pub fn run(name: &str, seconds: u64, alone: u64, rate: Option<u64>) -> Result<Outcome> {
    let attack = find(name)?;
    bed::run(
        attack,
        Duration::from_secs(seconds),
        Duration::from_secs(alone.min(seconds)),
        rate.unwrap_or(attack.rate),
    )
}

/// Runs `lvs-testbed attack`.
///
/// # Errors
///
/// As [`run`] and [`Outcome::check`].
pub fn main(options: &AttackOptions) -> Result<()> {
    if options.list {
        for attack in ATTACKS {
            println!("{:<15} {}", attack.name, attack.summary);
        }
        return Ok(());
    }
    let all = options.names.is_empty() || options.names == ["all"];
    let chosen: Vec<&str> = if all {
        names().collect()
    } else {
        options.names.iter().map(String::as_str).collect()
    };
    let mut outcomes = Vec::new();
    for name in chosen {
        let outcome = run(name, options.seconds, options.alone, options.rate)?;
        if options.json {
            println!("{}", serde_json::to_string(&outcome)?);
        } else {
            eprintln!(
                "{name}: {} frames, requests or rounds of logged changes sent",
                outcome.sent
            );
        }
        outcomes.push(outcome);
    }
    if !options.json {
        print!("{}", table(&outcomes));
    }
    outcomes.iter().try_for_each(Outcome::check)
}

fn table(outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for outcome in outcomes {
        let (before, beside) = (&outcome.before, &outcome.beside);
        let drops: Vec<String> = outcome
            .drops
            .iter()
            .map(|(reason, count)| format!("{reason} {count}"))
            .collect();
        text.push_str(&format!(
            "{}: {}\n  served    {:.2} % ({:.2} % without the attack), {} failed; downloads {} of {}\n  \
             latency   p50 {:.1} ms ({:.1}), p99 {:.1} ms ({:.1})\n  silence   {:.0} ms ({:.0})\n  \
             memory    {} MB above idle\n  sent      {}; UDP datagrams at servers {}\n  dropped   {}\n",
            outcome.name,
            outcome.bound,
            beside.success(),
            before.success(),
            beside.failed,
            beside.downloads,
            beside.downloads + beside.broken,
            beside.p50_ms,
            before.p50_ms,
            beside.p99_ms,
            before.p99_ms,
            beside.silence_ms,
            before.silence_ms,
            outcome.memory_mb(),
            outcome.sent,
            outcome.echoed,
            if drops.is_empty() {
                "nothing".to_owned()
            } else {
                drops.join(", ")
            },
        ));
        if let Some(error) = &beside.error {
            text.push_str(&format!("  1st error {error}\n"));
        }
        if let Some(delays) = &outcome.delays {
            for (beside, delays) in [
                ("alone", &delays.before),
                ("busy users", &delays.busy_users),
                ("attack", &delays.beside),
            ] {
                text.push_str(&format!(
                    "  packets   p50 {:.2} ms, p99 {:.2}, p99.9 {:.2}, longest {:.2}; {} of {} above 5 ms, {} lost; processors stolen {} ms ({beside})\n",
                    delays.p50_ms,
                    delays.p99_ms,
                    delays.p999_ms,
                    delays.longest_ms,
                    delays.over_5_ms,
                    delays.sent,
                    delays.lost,
                    delays.stolen_ms,
                ));
            }
        }
    }
    text
}

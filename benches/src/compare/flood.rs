//! Floods of 64-byte packets: the number of forwarded packets, and the CPU time for each.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Host, Proc};
use nix::sys::signal::Signal;
use serde::Deserialize;

use super::bed::{self, Bed};
use super::contender::{Contender, Method, Place};
use super::sample::{Cpu, Sample};
use crate::machine::Snapshot;
use crate::yardsticks::Yardsticks;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Flood {
    pub(super) flows: u32,
    /// Binary logarithm of the number of client addresses. The number of flows also limits the
    /// addresses.
    pub(super) client_bits: u32,
    /// Whether packets are sent from the server to the clients.
    pub(super) replies: bool,
    pub(super) v6: bool,
}

/// The first rate, in packets per second, at which connections are opened with [`Place::Usual`].
const OPENING: u32 = 150_000;
/// The first rate, in packets per second, at which connections are opened with [`Place::OneCore`].
const OPENING_ONE_CORE: u32 = 60_000;
/// The rate at which connections are opened is halved after losses, until it is at most this number
/// of packets per second.
const OPENING_LEAST: u32 = 10_000;
/// Number of packets in the check.
const CHECKED: u64 = 16_384;
/// Rates in packets per second of the check. After a failure, the next rate is used.
const CHECKED_RATES: [&str; 3] = ["50000", "20000", "5000"];

/// A measurement in which no packet is forwarded ends after this time.
const PATIENCE: Duration = Duration::from_secs(3);

#[derive(Debug, Deserialize)]
struct Sent {
    sent: u64,
}

#[derive(Debug, Deserialize)]
struct Judgement {
    received: u64,
    bytes: u64,
    checksum: u64,
    address: u64,
    order: u64,
}

impl Flood {
    fn generator(
        self,
        bed: &Bed,
        yardsticks: &Yardsticks,
        seconds: u32,
        extra: &[&str],
    ) -> Result<Proc> {
        let [c, _, _, s] = &bed.devices;
        let (host, device, to, from) = if self.replies {
            (&bed.server, s, bed::BACK_MAC, bed::SERVER_MAC)
        } else if bed.who == Contender::Direct {
            (&bed.client, c, bed::SERVER_MAC, bed::CLIENT_MAC)
        } else {
            (&bed.client, c, bed::FRONT_MAC, bed::CLIENT_MAC)
        };
        let fixed = match (self.replies, self.v6) {
            (true, false) => bed::SERVER,
            (true, true) => bed::SERVER6,
            (false, v6) => bed.target(v6),
        };
        let clients = if self.v6 { "fd00:128::" } else { "10.128.0.0" };
        let (seconds, flows) = (seconds.to_string(), self.flows.to_string());
        let bits = self.client_bits.to_string();
        let mut words = vec![
            "-i", device, "-d", to, "-e", from, "-a", clients, "-v", fixed,
        ];
        words.extend(["-t", &seconds, "-f", &flows, "-b", &bits, "-c", "0"]);
        if self.replies {
            words.push("-R");
        }
        if self.v6 {
            words.push("-6");
        }
        words.extend(extra);
        bed::ready(host.spawn(yardsticks.path("gen"), &words)?)
            .context("the generator did not start")
    }

    fn sink(self, bed: &Bed) -> (&Host, &str) {
        let [c, _, _, s] = &bed.devices;
        if self.replies {
            (&bed.client, c)
        } else {
            (&bed.server, s)
        }
    }

    /// Opens the flood's connections, and checks that packets of some of these connections arrive
    /// complete, unchanged and in order.
    pub(super) fn prepare(self, bed: &mut Bed, yardsticks: &Yardsticks) -> Result<()> {
        bed.resume()?;
        let forward = Self {
            replies: false,
            ..self
        };
        if bed.who.has_connections() {
            forward.open(bed, yardsticks)?;
        }
        if bed.who.is_fast_path() {
            // Further packets offload connections that were not offloaded because others were
            // offloaded first.
            forward.open(bed, yardsticks)?;
        }
        let few = Self {
            flows: self.flows.min(64),
            ..self
        };
        let mut last = Ok(());
        for rate in CHECKED_RATES {
            last = few.check(bed, yardsticks, rate);
            if last.is_ok() {
                break;
            }
        }
        bed.check_alive()?;
        bed.pause()?;
        last.with_context(|| format!("{} does not forward correctly", bed.who.name()))
    }

    /// Opens all connections of the flood. After losses, opens them again at half the rate.
    fn open(self, bed: &Bed, yardsticks: &Yardsticks) -> Result<()> {
        let mut rate = match bed.place {
            Place::Usual => OPENING,
            Place::OneCore => OPENING_ONE_CORE,
        };
        let mut last = self.open_at(rate, bed, yardsticks);
        while last.is_err() && rate > OPENING_LEAST {
            rate /= 2;
            last = self.open_at(rate, bed, yardsticks);
        }
        last
    }

    fn open_at(self, rate: u32, bed: &Bed, yardsticks: &Yardsticks) -> Result<()> {
        let seconds = self.flows.div_ceil(rate) + 1;
        let (host, device) = self.sink(bed);
        let before = Bed::received(host, device)?;
        let mut generator = self.generator(bed, yardsticks, seconds, &["-r", &rate.to_string()])?;
        generator.wait(Duration::from_secs(u64::from(seconds) + 5))?;
        let sent: Sent = report(&generator)?;
        bed::settle(Duration::from_millis(200));
        let arrived = Bed::received(host, device)? - before;
        ensure!(
            sent.sent >= u64::from(self.flows) && arrived * 1000 >= sent.sent * 995,
            "of {} packets that open {} connections, {arrived} arrived",
            sent.sent,
            self.flows
        );
        Ok(())
    }

    fn check(self, bed: &Bed, yardsticks: &Yardsticks, rate: &str) -> Result<()> {
        let (host, device) = self.sink(bed);
        let nat = bed.who.method() == Some(Method::Nat)
            || matches!(bed.who, Contender::Nftables | Contender::NullTun);
        let (from, to) = match (self.replies, self.v6, nat) {
            (false, true, false) if bed.who == Contender::Route => {
                ("fd00:128::/32", "fd00:72::11/128")
            }
            (_, true, true) if self.replies => ("fd00:73::1/128", "fd00:128::/32"),
            (_, true, _) => (
                "fd00:128::/32",
                if nat {
                    "fd00:72::/64"
                } else {
                    "fd00:73::1/128"
                },
            ),
            (true, false, true) => ("10.73.0.1/32", "10.128.0.0/9"),
            (true, false, false) => ("10.72.0.11/32", "10.128.0.0/9"),
            (false, false, true) => ("10.128.0.0/9", "10.72.0.0/24"),
            (false, false, false) if bed.who == Contender::Route => {
                ("10.128.0.0/9", "10.72.0.11/32")
            }
            (false, false, false) => ("10.128.0.0/9", "10.73.0.1/32"),
        };
        let mut judge = bed::ready(host.spawn(
            yardsticks.path("judge"),
            &["-i", device, "-d", to, "-f", from],
        )?)?;
        let count = CHECKED.to_string();
        let words = ["-m", "send", "-N", "-s", "90", "-n", &count, "-r", rate];
        let mut generator = self.generator(bed, yardsticks, 5, &words)?;
        generator.wait(Duration::from_secs(8))?;
        bed::settle(Duration::from_millis(50));
        judge.stop(Signal::SIGTERM)?;
        let found: Judgement = report(&judge)?;
        ensure!(
            found.received == CHECKED,
            "of {CHECKED} packets {} arrived",
            found.received
        );
        ensure!(
            (found.bytes, found.checksum, found.address, found.order) == (0, 0, 0, 0),
            "of {CHECKED} packets, contents changed in {}, checksums were wrong in {}, addresses in {}, and {} arrived out of order",
            found.bytes,
            found.checksum,
            found.address,
            found.order
        );
        Ok(())
    }

    /// Measures the forwarded packets per second, and the CPU time for each packet. With the kernel
    /// fast path, fails if it has forwarded less than 99 % of the packets.
    pub(super) fn measure(
        self,
        bed: &mut Bed,
        yardsticks: &Yardsticks,
        window: Duration,
    ) -> Result<Sample> {
        bed.resume()?;
        let mut generator = self.generator(bed, yardsticks, 10, &[])?;
        bed::settle(Duration::from_millis(250));
        let (host, device) = self.sink(bed);
        let fast_path = bed.who.is_fast_path();
        let forwarded = if fast_path { bed.fast_path()? } else { 0 };
        let first = Snapshot::take();
        let before = Bed::received(host, device)?;
        let start = std::time::Instant::now();
        // On a busy machine, the director may not have had a processor in a short window.
        let packets = loop {
            bed::settle(window);
            let packets = Bed::received(host, device)? - before;
            if packets > 0 || start.elapsed() >= PATIENCE {
                break packets;
            }
        };
        let seconds = start.elapsed().as_secs_f64();
        let used = Snapshot::take().since(&first, bed.pid(), &[&bed.devices[1], &bed.devices[2]]);
        if fast_path {
            let forwarded = bed.fast_path()? - forwarded;
            ensure!(
                forwarded * 100 >= packets * 99,
                "of {packets} packets only {forwarded} were forwarded by the kernel fast path"
            );
        }
        generator.stop(Signal::SIGTERM)?;
        bed.check_alive()?;
        bed.pause()?;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^52")]
        let packets = packets as f64;
        Ok(Sample {
            value: packets / seconds,
            cpu: Some(Cpu::per(&used, packets)),
            disturbed: used.disturbed(),
        })
    }

    /// Starts the flood at `rate` packets per second, for the duration of another measurement.
    pub(super) fn beside(self, bed: &Bed, yardsticks: &Yardsticks, rate: f64) -> Result<Proc> {
        let rate = format!("{rate:.0}");
        self.generator(bed, yardsticks, 60, &["-m", "send", "-r", &rate])
    }
}

/// Parses the last line that a yardstick has printed.
fn report<T: for<'a> Deserialize<'a>>(process: &Proc) -> Result<T> {
    let log = process.log();
    let line = log.lines().last().unwrap_or_default();
    serde_json::from_str(line)
        .with_context(|| format!("a yardstick printed no valid report:\n{log}"))
}

//! Pinned connections: a health check uses the path of a client's packets, and reaches exactly the
//! server that it checks.

use alloc::collections::BTreeMap;
#[cfg(test)]
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::time::Duration;

use super::Control;
use crate::{Error, Instant, Protocol, ServiceKey};

/// Maximum number of pins whose connections have not been opened yet.
pub(crate) const PINS_MAX: usize = 16_384;

/// Time after which a pin expires if its connection has not been opened.
const LIFE: Duration = Duration::from_secs(660);

/// Protocol and address of the client, and the number of the service.
type From = (u8, SocketAddr, u32);

/// The pins of health checks that are about to start: each assigns the next connection of a client
/// to a server. There are few pins, and they are short-lived.
#[derive(Debug, Default)]
pub(super) struct Pins {
    all: BTreeMap<From, (SocketAddr, Instant)>,
    /// Time of the next search for expired pins.
    next: Instant,
}

impl Pins {
    /// Removes the pin of a client's connection to a service, if there is one.
    pub(super) fn remove(&mut self, protocol: Protocol, client: SocketAddr, service: u32) {
        self.all.remove(&(protocol.0, client, service));
    }

    /// The server of the unexpired pin for this connection.
    pub(super) fn find(
        &self,
        protocol: Protocol,
        client: SocketAddr,
        service: u32,
        now: Instant,
    ) -> Option<SocketAddr> {
        let &(server, until) = self.all.get(&(protocol.0, client, service))?;
        (now < until).then_some(server)
    }

    /// Removes expired pins, at most twice in the lifetime of a pin.
    fn tidy(&mut self, now: Instant) {
        if now >= self.next {
            self.all.retain(|_, (_, until)| now < *until);
            self.next = now + LIFE / 2;
        }
    }
}

impl Control {
    /// The next connection of `client` to the service within 11 minutes uses `server`, regardless
    /// of the scheduler, the server's weight, filters and limits: for through-VIP checks.
    ///
    /// # Errors
    /// [`Error::NoService`] (also for the service of a firewall mark, which has no protocol),
    /// [`Error::NoServer`], and [`Error::TooManyPins`] while 16,384 pins wait for their
    /// connections.
    pub fn pin(
        &mut self,
        key: &ServiceKey,
        server: SocketAddr,
        client: SocketAddr,
        now: Instant,
    ) -> Result<(), Error> {
        let (protocol, number) = self.pinnable(key)?;
        if !self.services[&number]
            .servers()
            .iter()
            .any(|s| s.addr() == server)
        {
            return Err(Error::NoServer);
        }
        self.pins.tidy(now);
        let from = (protocol.0, client, number);
        if self.pins.all.len() >= PINS_MAX && !self.pins.all.contains_key(&from) {
            return Err(Error::TooManyPins);
        }
        self.pins.all.insert(from, (server, now + LIFE));
        Ok(())
    }

    /// Removes the pin of `client`. Returns `true` if the pin was neither used nor expired: since
    /// the call of [`pin`](Self::pin), no packet of the connection arrived, or each was dropped.
    ///
    /// # Errors
    /// [`Error::NoService`], as for [`pin`](Self::pin).
    pub fn unpin(
        &mut self,
        key: &ServiceKey,
        client: SocketAddr,
        now: Instant,
    ) -> Result<bool, Error> {
        let (protocol, number) = self.pinnable(key)?;
        let waits = self.pins.find(protocol, client, number, now).is_some();
        self.pins.remove(protocol, client, number);
        Ok(waits)
    }

    /// The protocol and the number of a service whose connections can be pinned.
    fn pinnable(&self, key: &ServiceKey) -> Result<(Protocol, u32), Error> {
        let ServiceKey::Address { protocol, addr } = *key else {
            return Err(Error::NoService);
        };
        let number = self.find_service(0, protocol, addr);
        Ok((protocol, number.ok_or(Error::NoService)?))
    }

    #[cfg(test)]
    fn pinned(&self) -> Vec<SocketAddr> {
        self.pins.all.keys().map(|from| from.1).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Family, Forwarding, Hook, Options, PacketMeta, Protocol, ServerConfig, ServiceConfig,
        TcpFlags, Transport, Tuple, Verdict,
    };

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn connection_of_ended_health_check_expires_early_and_does_not_count_for_server() {
        let mut control = Control::new(Options::default());
        let mut shard = control.shard(0).unwrap();
        let (vip, server) = (address("198.51.100.1:80"), address("10.0.0.1:80"));
        let (check, client) = (address("192.0.2.1:1000"), address("192.0.2.9:1000"));
        let config = ServerConfig::new(1, Forwarding::Nat);
        for key in [ServiceKey::tcp(vip), ServiceKey::udp(vip)] {
            control
                .add_service(key, ServiceConfig::new(Family::V4, "rr"), None)
                .unwrap();
            control
                .add_server(&key, server, &config, Instant::ZERO)
                .unwrap();
            control.pin(&key, server, check, Instant::ZERO).unwrap();
        }
        let mut send = |shard: &mut crate::Shard, meta: PacketMeta<'_>| {
            if let Err(pending) = shard.handle_packet(&meta, Instant::ZERO) {
                let _forwarded = control.admit(shard, &meta, pending, Instant::ZERO);
            }
        };
        for source in [check, client] {
            for flags in [TcpFlags::SYN, TcpFlags::ACK, TcpFlags::RST] {
                send(&mut shard, PacketMeta::tcp(Hook::Local, source, vip, flags));
            }
            let tuple = Tuple::new(Protocol::UDP, source, vip);
            let datagram = PacketMeta::new(Hook::Local, tuple, Transport::Udp(&[]), 28);
            send(&mut shard, datagram);
        }
        // The connections of the check do not count, so that a drained server becomes empty.
        for key in [ServiceKey::tcp(vip), ServiceKey::udp(vip)] {
            let service = control.service(&key).unwrap();
            let counted = &service.servers()[0];
            assert_eq!((counted.active(), counted.total()), (0, 1), "{key:?}");
            assert_eq!(service.stats().live.conns, 1, "{key:?}");
        }
        let mut left = |seconds| {
            control.advance_with(&mut shard, Instant::from_secs(seconds));
            shard.len()
        };
        assert_eq!(
            [0, 1, 9, 10, 29, 30, 299, 300].map(&mut left),
            [4, 3, 3, 2, 2, 1, 1, 0]
        );
    }

    #[test]
    fn pin_assigns_one_connection_to_its_server_until_pin_expires() {
        let mut control = Control::new(Options::default());
        let mut shard = control.shard(0).unwrap();
        let vip = address("198.51.100.1:80");
        let key = ServiceKey::tcp(vip);
        let now = Instant::ZERO;
        control
            .add_service(key, ServiceConfig::new(Family::V4, "rr"), None)
            .unwrap();
        let servers = [("10.0.0.1:80", 1), ("10.0.0.2:80", 0)];
        for (server, weight) in servers {
            let config = ServerConfig::new(weight, Forwarding::Nat);
            control
                .add_server(&key, address(server), &config, now)
                .unwrap();
        }
        let quiesced = address(servers[1].0);
        let client = address("192.0.2.1:1000");
        assert_eq!(
            control.pin(&key, address("10.0.0.3:80"), client, now),
            Err(Error::NoServer)
        );
        let other = ServiceKey::udp(vip);
        assert_eq!(
            control.pin(&other, quiesced, client, now),
            Err(Error::NoService)
        );
        control.pin(&key, quiesced, client, now).unwrap();
        let late = address("192.0.2.1:1001");
        control.pin(&key, quiesced, late, now).unwrap();
        let mut target = |client: SocketAddr, now: Instant| {
            let meta = PacketMeta::tcp(Hook::Local, client, vip, TcpFlags::SYN);
            let verdict = match shard.handle_packet(&meta, now) {
                Ok(verdict) => verdict,
                Err(pending) => control.admit(&mut shard, &meta, pending, now),
            };
            match verdict {
                Verdict::Forward(forward) => forward.target,
                other => panic!("client {client}: {other:?}"),
            }
        };
        assert_eq!(
            target(address("192.0.2.9:1000"), now),
            address(servers[0].0)
        );
        assert_eq!(target(client, now), quiesced, "the pin was not used");
        assert_eq!(
            target(late, now + LIFE),
            address(servers[0].0),
            "an old pin was used"
        );
        assert_eq!(control.unpin(&key, late, now + LIFE), Ok(false));
        assert!(control.pinned().is_empty());
        for (client, probe) in [(client, true), (address("192.0.2.9:1000"), false)] {
            let server = if probe {
                quiesced
            } else {
                address(servers[0].0)
            };
            let flags = TcpFlags::SYN | TcpFlags::ACK;
            let meta = PacketMeta::tcp(Hook::Transit, server, client, flags);
            match shard.handle_packet(&meta, now) {
                Ok(Verdict::Reply(reply)) => assert_eq!(reply.probe, probe, "{client}"),
                other => panic!("reply to {client}: {other:?}"),
            }
        }
        // Connections of health checks are not counted as attempts.
        let attempts = |id| control.server_attempts(crate::ServerId(id)).unwrap();
        assert_eq!([0, 1].map(|id| attempts(id).total.opened), [2, 0]);
    }

    #[test]
    fn pin_of_dropped_connection_is_reported_as_unopened() {
        let mut control = Control::new(Options {
            max_connections: 1,
            ..Options::default()
        });
        let mut shard = control.shard(0).unwrap();
        let (vip, server) = (address("198.51.100.1:80"), address("10.0.0.1:80"));
        let key = ServiceKey::tcp(vip);
        let now = Instant::ZERO;
        control
            .add_service(key, ServiceConfig::new(Family::V4, "rr"), None)
            .unwrap();
        control
            .add_server(&key, server, &ServerConfig::new(1, Forwarding::Nat), now)
            .unwrap();
        let [opened, dropped] = ["192.0.2.1:1000", "192.0.2.1:1001"].map(address);
        for client in [opened, dropped] {
            control.pin(&key, server, client, now).unwrap();
            let meta = PacketMeta::tcp(Hook::Local, client, vip, TcpFlags::SYN);
            let pending = shard.handle_packet(&meta, now).unwrap_err();
            let verdict = control.admit(&mut shard, &meta, pending, now);
            let is_forwarded = matches!(verdict, Verdict::Forward(_));
            assert_eq!(is_forwarded, client == opened, "{client}: {verdict:?}");
        }
        assert_eq!(control.unpin(&key, opened, now), Ok(false));
        assert_eq!(control.unpin(&key, dropped, now), Ok(true));
        assert_eq!(
            control.unpin(&key, dropped, now),
            Ok(false),
            "the pin remains"
        );
    }

    #[test]
    fn pins_are_bounded_and_expire() {
        let mut control = Control::new(Options::default());
        let key = ServiceKey::tcp(address("198.51.100.1:80"));
        let server = address("10.0.0.1:80");
        control
            .add_service(key, ServiceConfig::new(Family::V4, "rr"), None)
            .unwrap();
        let now = Instant::ZERO;
        control
            .add_server(&key, server, &ServerConfig::new(1, Forwarding::Nat), now)
            .unwrap();
        let client = |n: usize| {
            let [.., addr, upper, lower] = n.to_be_bytes();
            SocketAddr::from(([192, 0, addr, 2], u16::from_be_bytes([upper, lower])))
        };
        for n in 0..PINS_MAX {
            control.pin(&key, server, client(n), now).unwrap();
        }
        assert_eq!(
            control.pin(&key, server, client(PINS_MAX), now),
            Err(Error::TooManyPins)
        );
        control
            .pin(&key, server, client(0), now)
            .expect("an existing pin can be renewed");
        control
            .pin(&key, server, client(PINS_MAX), now + LIFE)
            .expect("the other pins have expired");
        assert_eq!(control.pinned(), [client(PINS_MAX)]);
    }
}

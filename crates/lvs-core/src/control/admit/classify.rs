//! The steps of the decision about a packet that may open a connection (`ip_vs_schedule`).
//!
//! Only this module contains the steps and their order. [`Control::admit`] executes them with
//! [`Admission`](super::Admission), which changes the state. [`Control::explain`] executes them
//! with a preview, which changes nothing.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::persistent::template_key;
use super::{Ask, is_unicast};
use crate::conn::{Key, Template};
use crate::control::{Control, FTP, FTP_DATA};
use crate::persistence_sip;
use crate::shard::Shard;
use crate::{
    AcceptReason, DropReason, Hook, Instant, Protocol, Request, Server, ServiceFlags, ServiceKey,
    Verdict,
};

/// Maximum number of other servers that are tried if full NAT has no free local port towards the
/// chosen server.
const OTHERS: usize = 8;

/// Reasons why a packet opens no connection.
pub(in crate::control) enum Refused<U> {
    Accept(AcceptReason),
    Drop(DropReason),
    Unreachable(DropReason),
    /// A preview cannot foresee the decision.
    Unknown(U),
}

impl<U> From<AcceptReason> for Refused<U> {
    fn from(reason: AcceptReason) -> Self {
        Self::Accept(reason)
    }
}

impl<U> From<DropReason> for Refused<U> {
    fn from(reason: DropReason) -> Self {
        Self::Drop(reason)
    }
}

impl From<Refused<core::convert::Infallible>> for Verdict {
    fn from(refused: Refused<core::convert::Infallible>) -> Self {
        match refused {
            Refused::Accept(reason) => Self::Accept(reason),
            Refused::Drop(reason) => Self::Drop(reason),
            Refused::Unreachable(reason) => Self::Unreachable(reason),
            Refused::Unknown(never) => match never {},
        }
    }
}

/// Number of packets that a connection is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::control) enum Packets {
    /// One-packet scheduling: the connection ends with its first packet.
    One,
    /// The connection lasts until its timer ends.
    Any,
}

/// The step that chose the server of a connection.
#[derive(Clone, Copy)]
pub(in crate::control) enum By<T> {
    Pin,
    Template(T),
    Scheduler,
    /// One of the next servers in the list, because full NAT has no free local port towards the
    /// scheduler's choice.
    NextServer,
}

/// The state that the decision reads. The decision changes the state unless it is a preview.
pub(in crate::control) trait State {
    type Opened;
    type Template: Copy;
    /// The reason why a preview cannot foresee a step.
    type Unknown;

    fn control(&self) -> &Control;

    fn shard(&self) -> &Shard;

    /// Whether the defence `drop_packet` drops this packet.
    fn drops_packet(&mut self) -> bool;

    /// Removes the pin ([`Control::pin`]) of this connection, which has been opened.
    fn remove_pin(&mut self, ask: &Ask<'_>, service: u32);

    /// Updates the shard's copies of settings and links.
    fn refresh(&mut self);

    fn check_limits(
        &mut self,
        service: u32,
        client: IpAddr,
        now: Instant,
    ) -> Result<(), DropReason>;

    /// The part of a datagram that the persistence engine uses; `None` if the datagram has no such
    /// part.
    fn engine_data<'a>(&mut self, ask: &Ask<'a>) -> Result<Option<&'a [u8]>, Self::Unknown>;

    /// The packet's template and its server; `None` without a template, or if the server must not
    /// be used.
    fn find_template(
        &mut self,
        key: &Key,
        data: Option<&[u8]>,
        now: Instant,
    ) -> Option<(Self::Template, Arc<Server>)>;

    /// Stores a new template; `None` if the table of templates is full.
    fn make_template(
        &mut self,
        template: Template,
        server: &Server,
        now: Instant,
    ) -> Option<Self::Template>;

    fn restart_template(&mut self, template: Self::Template, now: Instant);

    /// Chooses a server by the service's scheduler; `None` if the scheduler finds no usable server.
    fn pick(
        &mut self,
        service: u32,
        request: &Request,
    ) -> Result<Option<Arc<Server>>, Self::Unknown>;

    /// Opens a connection to `server` (`ip_vs_conn_new`, `ip_vs_bind_dest`).
    fn bind(
        &mut self,
        server: &Arc<Server>,
        port: u16,
        ask: &Ask<'_>,
        packets: Packets,
        by: By<Self::Template>,
        now: Instant,
    ) -> Result<Self::Opened, DropReason>;

    /// Opens a connection to the packet's own destination, without a server (`cache_bypass`).
    fn bypass(
        &mut self,
        ask: &Ask<'_>,
        packets: Packets,
        now: Instant,
    ) -> Result<Self::Opened, DropReason>;
}

type Classified<S> = Result<<S as State>::Opened, Refused<<S as State>::Unknown>>;

/// Decides on a packet that may open a connection (`ip_vs_schedule`).
pub(in crate::control) fn classify<S: State>(
    state: &mut S,
    ask: &Ask<'_>,
    now: Instant,
) -> Classified<S> {
    let control = state.control();
    let number = control
        .find_service(ask.mark, ask.protocol, ask.virt)
        .ok_or(AcceptReason::NoService)?;
    if state.drops_packet() {
        return Err(DropReason::DropPacket.into());
    }
    if ask.client.port() == FTP_DATA {
        return Err(AcceptReason::SourcePort20.into());
    }
    if ask.hook == Hook::Output {
        let reversed = Key {
            protocol: ask.protocol,
            client: ask.virt,
            virt: ask.client,
        };
        if state.shard().find_from_client(&reversed).is_some() {
            return Err(AcceptReason::LocalReply.into());
        }
    }
    let control = state.control();
    let pin = control.pins.find(ask.protocol, ask.client, number, now);
    let pinned = pin.and_then(|server| {
        let servers = control.services.get(&number)?.servers();
        servers.iter().find(|s| s.addr() == server).cloned()
    });
    if let Some(server) = pinned {
        state.refresh();
        let port = ask.port_at(&server);
        let opened = state.bind(&server, port, ask, Packets::Any, By::Pin, now)?;
        state.remove_pin(ask, number);
        return Ok(opened);
    }
    let decided = state.control().filters.decide(number, ask.client.ip());
    if decided.is_some_and(|decided| !decided.taken()) {
        return Err(DropReason::Filtered.into());
    }
    state.refresh();
    let control = state.control();
    let service = &control.services[&number];
    let (key, flags) = (service.key, service.config.flags);
    if !service.config.extras.limits.is_off() {
        state.check_limits(number, ask.client.ip(), now)?;
    }
    let one = flags.has(ServiceFlags::ONE_PACKET) && ask.protocol == Protocol::UDP;
    let packets = if one { Packets::One } else { Packets::Any };
    if flags.has(ServiceFlags::PERSISTENT) {
        return persistent(state, number, ask, packets, now);
    }
    // Only a persistent service accepts ports other than its own: an FTP service, or a service of
    // port 0.
    let by_mark = matches!(key, ServiceKey::Mark { .. });
    let picked = if by_mark || ask.virt.port() == key.port() {
        let picked = state.pick(number, &ask.request(flags, now));
        picked.map_err(Refused::Unknown)?
    } else {
        None
    };
    let Some(server) = picked else {
        return leave(state, number, ask, packets, now);
    };
    let port = ask.port_at(&server);
    match state.bind(&server, port, ask, packets, By::Scheduler, now) {
        Ok(opened) => Ok(opened),
        Err(DropReason::NoLocalPort) => next_server(state, number, &server, ask, now),
        Err(reason) => Err(reason.into()),
    }
}

/// Opens the connection to one of the next usable servers after `but` in the list, because full NAT
/// has no free local port towards `but`. The first server follows the last one. Tries at most
/// [`OTHERS`] servers.
fn next_server<S: State>(
    state: &mut S,
    number: u32,
    but: &Arc<Server>,
    ask: &Ask<'_>,
    now: Instant,
) -> Classified<S> {
    let servers = match state.control().services.get(&number) {
        Some(service) => service.servers(),
        None => &[],
    };
    let after = servers.iter().position(|server| Arc::ptr_eq(server, but));
    let (before, after) = servers.split_at(after.map_or(0, |after| after + 1));
    let others = after.iter().chain(before);
    let others = others.filter(|server| server.is_usable() && !Arc::ptr_eq(server, but));
    let others: Vec<Arc<Server>> = others.take(OTHERS).cloned().collect();
    for server in others {
        let port = ask.port_at(&server);
        match state.bind(&server, port, ask, Packets::Any, By::NextServer, now) {
            Err(DropReason::NoLocalPort) => {}
            opened => return Ok(opened?),
        }
    }
    Err(DropReason::NoLocalPort.into())
}

/// Opens a connection to the server of the client's persistence template (`ip_vs_sched_persist`).
/// If no template is usable, the scheduler chooses the server, and a new template is stored. A
/// datagram without data for the service's persistence engine is dropped.
fn persistent<S: State>(
    state: &mut S,
    number: u32,
    ask: &Ask<'_>,
    packets: Packets,
    now: Instant,
) -> Classified<S> {
    let service = &state.control().services[&number];
    let (service_key, netmask) = (service.key, service.config.netmask);
    let (flags, timeout) = (service.config.flags, service.config.timeout);
    let mut data = None;
    if service.config.engine.is_some() {
        data = state.engine_data(ask).map_err(Refused::Unknown)?;
        if data.is_none() {
            return Err(DropReason::PersistenceEngine.into());
        }
    }
    let (key, keeps_port) = template_key(service_key, netmask, ask.protocol, ask.client, ask.virt);
    let (template, server) = match state.find_template(&key, data, now) {
        Some(found) => found,
        None => {
            let picked = state.pick(number, &ask.request(flags, now));
            let Some(server) = picked.map_err(Refused::Unknown)? else {
                return leave(state, number, ask, packets, now);
            };
            let port = if keeps_port { server.addr().port() } else { 0 };
            let bits = server.connection_flags(state.control().settings.sysctls.conntrack);
            let addr = SocketAddr::new(server.addr().ip(), port);
            let mut template = Template::new(key, addr, bits, timeout, now);
            template.server = server.id().0.into();
            template.mark = ask.mark;
            template.engine = data.map(|data| (persistence_sip::SIP, data.into()));
            let made = state.make_template(template, &server, now);
            (made.ok_or(DropReason::TableFull)?, server)
        }
    };
    let port = match server.addr().port() {
        port if port != 0 && ask.virt.port() == service_key.port() => port,
        _ => ask.virt.port(),
    };
    let opened = state.bind(&server, port, ask, packets, By::Template(template), now);
    state.restart_template(template, now);
    Ok(opened?)
}

/// Decides about a packet if no server accepts the connection (`ip_vs_leave`).
fn leave<S: State>(
    state: &mut S,
    number: u32,
    ask: &Ask<'_>,
    packets: Packets,
    now: Instant,
) -> Classified<S> {
    let control = state.control();
    let key = control.services[&number].key;
    if control.settings.sysctls.cache_bypass
        && matches!(key, ServiceKey::Mark { .. })
        && !ask.embedded
        && control.may_bypass(ask.virt.ip())
    {
        return Ok(state.bypass(ask, packets, now)?);
    }
    Err(if key.port() == FTP && ask.virt.port() != FTP {
        AcceptReason::FtpData.into()
    } else if ask.embedded {
        DropReason::NoServer.into()
    } else {
        Refused::Unreachable(DropReason::NoServer)
    })
}

impl Control {
    /// Whether a packet to `addr` may be sent there if no server is available: to unicast addresses
    /// (`ip_vs_addr_is_unicast`), with IPv4 except addresses of the host. With IPv6, as in the
    /// kernel, addresses of the host are not excluded: the packets of such a connection are lost.
    fn may_bypass(&self, addr: IpAddr) -> bool {
        is_unicast(addr) && (addr.is_ipv6() || !self.is_local(addr))
    }
}

//! The threads that forward data between clients and servers, and their listeners.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use lvs_core::api::ServiceId;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::mpsc;

use super::balancer::Balancer;
use super::close_signal::CloseSignal;
use super::{tcp, udp};

/// Maximum number of threads. There are also not more threads than processors.
const WORKERS_MAX: usize = 16;
/// Maximum number of connections of a listener that wait to be accepted; the kernel may lower it.
const BACKLOG: i32 = 4096;

/// Listeners of a service, one for each worker. The kernel distributes clients among them.
pub(super) struct Listeners {
    service: ServiceId,
    address: SocketAddr,
    sockets: Vec<Socket>,
}

struct Order {
    service: ServiceId,
    address: SocketAddr,
    socket: Socket,
    close_signal: Arc<CloseSignal>,
}

/// The worker threads, which exit when this value is dropped.
pub(super) struct Workers(Vec<mpsc::UnboundedSender<Order>>);

impl Listeners {
    pub(super) const fn service(&self) -> ServiceId {
        self.service
    }
}

impl Workers {
    pub(super) fn start(balancer: &Arc<Balancer>) -> io::Result<Self> {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let mut all = Vec::new();
        for number in 0..count.min(WORKERS_MAX) {
            let (sender, orders) = mpsc::unbounded_channel();
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            let balancer = Arc::clone(balancer);
            std::thread::Builder::new()
                .name(format!("lvs-proxy-{number}"))
                .spawn(move || {
                    let tasks = tokio::task::LocalSet::new();
                    runtime.block_on(tasks.run_until(work(balancer, orders)));
                })?;
            all.push(sender);
        }
        Ok(Self(all))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Binds the address of a service for each worker. The kernel already queues connections and
    /// datagrams; the workers process them from [`serve`](Self::serve) on.
    pub(super) fn bind(&self, service: ServiceId, address: SocketAddr) -> io::Result<Listeners> {
        let sockets = self.0.iter().map(|_| bind(&service, address));
        Ok(Listeners {
            service,
            address,
            sockets: sockets.collect::<io::Result<_>>()?,
        })
    }

    /// Makes the workers accept connections or receive datagrams until `close_signal` is set.
    pub(super) fn serve(&self, listeners: Listeners, close_signal: &Arc<CloseSignal>) {
        for (worker, socket) in self.0.iter().zip(listeners.sockets) {
            // The workers exit only when `self` is dropped.
            let _ = worker.send(Order {
                service: listeners.service,
                address: listeners.address,
                socket,
                close_signal: Arc::clone(close_signal),
            });
        }
    }
}

fn bind(service: &ServiceId, address: SocketAddr) -> io::Result<Socket> {
    let (kind, protocol) = match service {
        ServiceId::Udp { .. } => (Type::DGRAM, Protocol::UDP),
        _ => (Type::STREAM, Protocol::TCP),
    };
    let socket = Socket::new(
        Domain::for_address(address),
        kind.nonblocking(),
        Some(protocol),
    )?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.set_reuse_port(true)?;
    if protocol == Protocol::TCP {
        socket.set_reuse_address(true)?;
    }
    socket.bind(&address.into())?;
    if protocol == Protocol::TCP {
        socket.listen(BACKLOG)?;
    }
    Ok(socket)
}

async fn work(balancer: Arc<Balancer>, mut orders: mpsc::UnboundedReceiver<Order>) {
    while let Some(Order {
        service,
        address,
        socket,
        close_signal,
    }) = orders.recv().await
    {
        let balancer = Arc::clone(&balancer);
        let started = match service {
            ServiceId::Udp { .. } => UdpSocket::from_std(socket.into()).map(|socket| {
                let serving = udp::serve(balancer, service, address, socket, close_signal);
                tokio::task::spawn_local(serving);
            }),
            _ => TcpListener::from_std(socket.into()).map(|listener| {
                tokio::spawn(tcp::serve(
                    balancer,
                    service,
                    address,
                    listener,
                    close_signal,
                ));
            }),
        };
        if let Err(error) = started {
            tracing::error!("cannot serve {address}: {error}; restart lvsd");
        }
    }
}

//! Records requests that were longer than the MTU of the path to their server and must not be
//! fragmented; `lvsadm` lists them.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Mutex;

use lvs_core::api::TooBig;
use lvs_sys::lock;

/// Maximum number of servers for which requests that were too long are recorded.
const SERVERS_MAX: usize = 256;

/// Requests that were longer than the MTU of the path to their server, for all workers of a
/// director. The key is the address of the server, and whether a tunnel is used.
#[derive(Debug, Default)]
pub struct Oversize(Mutex<BTreeMap<(IpAddr, bool), TooBig>>);

impl Oversize {
    /// Records that a packet of `longest` bytes was too long for the path to `server`, whose MTU is
    /// `room` bytes. If the list is full, the packet of a further server is not recorded.
    pub fn note(&self, server: IpAddr, tunnel: bool, room: usize, longest: usize) {
        let mut noted = lock(&self.0);
        if noted.len() >= SERVERS_MAX && !noted.contains_key(&(server, tunnel)) {
            return;
        }
        let entry = noted.entry((server, tunnel)).or_insert(TooBig {
            server,
            tunnel,
            room: 0,
            longest: 0,
            packets: 0,
        });
        entry.room = u32::try_from(room).unwrap_or(u32::MAX);
        entry.longest = entry
            .longest
            .max(u32::try_from(longest).unwrap_or(u32::MAX));
        entry.packets += 1;
    }

    /// Returns the entries of all servers.
    pub fn all(&self) -> Vec<TooBig> {
        let noted = lock(&self.0);
        noted.values().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oversize_records_longest_packet_for_limited_number_of_servers() {
        let oversize = Oversize::default();
        let server = |n: u32| IpAddr::from((0x0a00_0000 + n).to_be_bytes());
        oversize.note(server(1), true, 1480, 1500);
        oversize.note(server(1), true, 1460, 1490);
        let noted = oversize.all();
        assert_eq!(noted.len(), 1);
        assert_eq!(
            (noted[0].room, noted[0].longest, noted[0].packets),
            (1460, 1500, 2)
        );
        (0..1000).for_each(|n| oversize.note(server(n), false, 1, 2));
        assert_eq!(oversize.all().len(), SERVERS_MAX);
    }
}

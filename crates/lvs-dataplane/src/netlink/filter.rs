//! Attaches the ingress program of the kernel fast path as a tc filter (clsact), for kernels
//! without tcx.
//!
//! A filter keeps its program when the dataplane is killed. The next dataplane finds the filter by
//! its fixed preference and handle, and identifies it by its name.

use std::collections::BTreeSet;
use std::io;

use super::message::{Message, attributes, text, u32_at};
use super::requests::Requests;

/// The parent of an ingress queueing discipline (`TC_H_CLSACT`, equal to `TC_H_INGRESS`).
const PARENT: u32 = 0xffff_fff1;
/// The handle of an ingress queueing discipline.
const HANDLE: u32 = 0xffff_0000;
/// The parent of filters at the ingress.
const INGRESS: u32 = 0xffff_fff2;
/// The parent of filters at the egress.
const EGRESS: u32 = 0xffff_fff3;
/// The first preference. Filters of other programs may have it, too.
const PREFERENCE: u32 = 1;
/// "LVS", a handle that no other program uses by accident.
const OURS: u32 = 0x004c_5653;
/// The name of the filter in the output of `tc`. A longer name means that the dataplane has also
/// created the queueing discipline.
const NAME: &str = "lvs_ingress";
const NAME_WITH_QDISC: &str = "lvs_ingress+clsact";

const KIND_BPF: &str = "bpf";
/// Constants of `linux/rtnetlink.h` and `linux/pkt_cls.h`.
const TCA_KIND: u16 = 1;
const TCA_OPTIONS: u16 = 2;
const TCA_BPF_FD: u16 = 6;
const TCA_BPF_NAME: u16 = 7;
const TCA_BPF_FLAGS: u16 = 8;
const TCA_BPF_FLAGS_GEN: u16 = 9;
const TCA_BPF_ID: u16 = 11;
/// Direct action: the program's return value decides about the packet.
const TCA_BPF_FLAG_ACT_DIRECT: u32 = 1;
const TCA_CLS_FLAGS_SKIP_HW: u32 = 1;
/// `tcmsg`: family, 3 bytes unused, interface, handle, parent, preference and protocol.
const HEADER: usize = 20;

/// Access to the kernel's filters, in this thread's network namespace.
#[derive(Debug)]
pub(crate) struct Filters {
    requests: Requests,
}

#[derive(Debug)]
struct Filter {
    handle: u32,
    preference: u32,
    name: String,
    /// The kernel's number of the filter's program; 0 if it has none.
    program: u32,
}

impl Filter {
    fn read(message: &Message<'_>) -> Option<Self> {
        let preference = u32_at(message.payload, 16)? >> 16;
        let mut filter = Self {
            handle: u32_at(message.payload, 8)?,
            preference,
            name: String::new(),
            program: 0,
        };
        let mut is_bpf = false;
        for (kind, value) in attributes(message.payload.get(HEADER..)?) {
            match kind {
                TCA_KIND => is_bpf = text(value) == KIND_BPF,
                TCA_OPTIONS if is_bpf => filter.read_options(value),
                _ => {}
            }
        }
        Some(filter)
    }

    fn read_options(&mut self, options: &[u8]) {
        for (kind, value) in attributes(options) {
            match kind {
                TCA_BPF_NAME => self.name = text(value),
                TCA_BPF_ID => self.program = u32_at(value, 0).unwrap_or(0),
                _ => {}
            }
        }
    }

    fn is_ours(&self) -> bool {
        let place = (self.preference, self.handle) == (PREFERENCE, OURS);
        place && [NAME, NAME_WITH_QDISC].contains(&&*self.name)
    }
}

impl Filters {
    pub(crate) fn open() -> io::Result<Self> {
        let requests = Requests::open()?;
        Ok(Self { requests })
    }

    /// Attaches a program to the ingress of an interface, as a filter with the first preference. It
    /// replaces the filter of an earlier dataplane in one step: no frame bypasses both.
    ///
    /// # Errors
    /// The interface does not exist, the kernel has no such filters (`CONFIG_NET_SCH_INGRESS`,
    /// `CONFIG_NET_CLS_BPF`), or another program uses the first preference for filters of another
    /// kind, or the handle of this filter.
    pub(crate) fn put(&mut self, ifindex: u32, program: i32) -> io::Result<()> {
        let there = self.at(ifindex, INGRESS)?;
        let there = there
            .iter()
            .find(|filter| (filter.preference, filter.handle) == (PREFERENCE, OURS));
        let made = match there {
            Some(filter) if !filter.is_ours() => {
                return Err(io::Error::new(
                    io::ErrorKind::AlreadyExists,
                    format!(
                        "the filter {} of another program uses the handle of lvs_ingress",
                        filter.name
                    ),
                ));
            }
            Some(filter) => filter.name == NAME_WITH_QDISC,
            None => self.make_qdisc(ifindex)?,
        };
        let put = self.put_filter(ifindex, program, made);
        if put.is_err() && made && there.is_none() {
            let _ = self.remove_qdisc(ifindex);
        }
        put
    }

    /// Removes the filter of a dataplane, and the queueing discipline if the dataplane has created
    /// it and no other filter uses it. Returns whether there was a filter.
    ///
    /// # Errors
    /// The kernel refuses the request or does not answer.
    pub(crate) fn take_away(&mut self, ifindex: u32) -> io::Result<bool> {
        let there = self.at(ifindex, INGRESS)?;
        let Some(ours) = there.iter().find(|filter| filter.is_ours()) else {
            return Ok(false);
        };
        let header = header(ifindex, OURS, INGRESS, info());
        self.requests
            .request(libc::RTM_DELTFILTER, 0, &header, |b| {
                b.attr_str(TCA_KIND, KIND_BPF);
            })?;
        if ours.name == NAME_WITH_QDISC
            && self.at(ifindex, INGRESS)?.is_empty()
            && self.at(ifindex, EGRESS)?.is_empty()
        {
            self.remove_qdisc(ifindex)?;
        }
        Ok(true)
    }

    /// Returns the kernel's number of the program that is the first filter at the ingress of an
    /// interface; 0 if there is no filter, or the first one is not a BPF program.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub(crate) fn first(&mut self, ifindex: u32) -> io::Result<u32> {
        let there = self.at(ifindex, INGRESS)?;
        Ok(there.first().map_or(0, |filter| filter.program))
    }

    /// Returns the interfaces with a filter of a dataplane.
    ///
    /// # Errors
    /// The kernel does not answer.
    pub(crate) fn interfaces(&mut self) -> io::Result<BTreeSet<u32>> {
        let mut candidates = BTreeSet::new();
        let any = header(0, 0, 0, 0);
        self.requests.dump(libc::RTM_GETQDISC, &any, |message| {
            if u32_at(message.payload, 12) == Some(PARENT) {
                candidates.extend(u32_at(message.payload, 4));
            }
        })?;
        let mut interfaces = BTreeSet::new();
        for ifindex in candidates {
            let there = self.at(ifindex, INGRESS)?;
            if there.iter().any(Filter::is_ours) {
                interfaces.insert(ifindex);
            }
        }
        Ok(interfaces)
    }

    /// Returns the filters of an interface at `side`, in the order in which they run.
    fn at(&mut self, ifindex: u32, side: u32) -> io::Result<Vec<Filter>> {
        let mut filters = Vec::new();
        let header = header(ifindex, 0, side, 0);
        self.requests
            .dump(libc::RTM_GETTFILTER, &header, |message| {
                let filter = Filter::read(message);
                // The dump of each preference begins with an entry without a handle.
                filters.extend(filter.filter(|filter| filter.handle != 0));
            })?;
        Ok(filters)
    }

    /// Creates the queueing discipline. Returns false if it existed before.
    fn make_qdisc(&mut self, ifindex: u32) -> io::Result<bool> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_EXCL;
        let header = header(ifindex, HANDLE, PARENT, 0);
        let made = self
            .requests
            .request(libc::RTM_NEWQDISC, flags, &header, |b| {
                b.attr_str(TCA_KIND, "clsact");
            });
        match made {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
            made => made.map(|()| true),
        }
    }

    fn remove_qdisc(&mut self, ifindex: u32) -> io::Result<()> {
        let header = header(ifindex, HANDLE, PARENT, 0);
        self.requests.request(libc::RTM_DELQDISC, 0, &header, |b| {
            b.attr_str(TCA_KIND, "clsact");
        })
    }

    fn put_filter(&mut self, ifindex: u32, program: i32, made: bool) -> io::Result<()> {
        let flags = libc::NLM_F_CREATE | libc::NLM_F_REPLACE;
        let header = header(ifindex, OURS, INGRESS, info());
        let name = if made { NAME_WITH_QDISC } else { NAME };
        self.requests
            .request(libc::RTM_NEWTFILTER, flags, &header, |b| {
                b.attr_str(TCA_KIND, KIND_BPF);
                b.nest(TCA_OPTIONS, |b| {
                    b.attr(TCA_BPF_FD, &program.to_ne_bytes());
                    b.attr_str(TCA_BPF_NAME, name);
                    b.attr(TCA_BPF_FLAGS, &TCA_BPF_FLAG_ACT_DIRECT.to_ne_bytes());
                    b.attr(TCA_BPF_FLAGS_GEN, &TCA_CLS_FLAGS_SKIP_HW.to_ne_bytes());
                });
            })
    }
}

/// Encodes a `tcmsg`.
fn header(ifindex: u32, handle: u32, parent: u32, info: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[4..8].copy_from_slice(&ifindex.to_ne_bytes());
    header[8..12].copy_from_slice(&handle.to_ne_bytes());
    header[12..16].copy_from_slice(&parent.to_ne_bytes());
    header[16..].copy_from_slice(&info.to_ne_bytes());
    header
}

/// The preference, and all protocols (`ETH_P_ALL`, in network byte order).
const fn info() -> u32 {
    PREFERENCE << 16 | 0x0003_u16.to_be() as u32
}

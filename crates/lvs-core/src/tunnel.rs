//! The types of tunnels to real servers, with their names and properties.

/// The checksum in the outer header of tunnelled packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(rename_all = "lowercase"))]
pub enum TunnelChecksum {
    /// The outer header has no checksum.
    #[default]
    None,
    /// A checksum in the outer header.
    Full,
    /// GUE's remote checksum offload: the receiver completes the inner checksum.
    Remote,
}

impl TunnelChecksum {
    /// All kinds of checksums.
    pub const ALL: &[Self] = &[Self::None, Self::Full, Self::Remote];

    /// The name of the checksum in the control protocol and in the file of `lvsd`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Full => "full",
            Self::Remote => "remote",
        }
    }

    /// The name of the checksum in ipvsadm's options, after `tun-`.
    pub const fn option(self) -> &'static str {
        match self {
            Self::None => "nocsum",
            Self::Full => "csum",
            Self::Remote => "remcsum",
        }
    }

    /// The abbreviation of the checksum in ipvsadm's listings.
    pub const fn sign(self) -> &'static str {
        match self {
            Self::None => "-c",
            Self::Full => "+c",
            Self::Remote => "r+c",
        }
    }
}

/// The encapsulation of a tunnelled server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(rename_all = "lowercase", tag = "type"))]
pub enum Tunnel {
    /// IP in IP (RFC 2003, RFC 4213, RFC 2473).
    #[default]
    Ipip,
    /// Generic UDP encapsulation, variant 0.
    Gue {
        /// Destination port of the outer UDP header.
        port: u16,
        /// The checksum of the outer UDP header.
        checksum: TunnelChecksum,
    },
    /// GRE (RFC 2784).
    Gre {
        /// The checksum in the GRE header.
        checksum: TunnelChecksum,
    },
}

/// Properties of a type of tunnel.
#[derive(Debug)]
pub struct TunnelType {
    /// The name in ipvsadm's options, in the control protocol and in the file of `lvsd`.
    pub name: &'static str,
    /// The name of the tunnel type in messages.
    pub title: &'static str,
    /// Whether the tunnel type uses a UDP port.
    pub has_port: bool,
    /// The checksums that the tunnel type supports; empty if there is no choice.
    pub checksums: &'static [TunnelChecksum],
    /// Bytes between the outer and the inner IP header, for each checksum in the order of
    /// [`TunnelChecksum::ALL`].
    pub header_len: [usize; TunnelChecksum::ALL.len()],
    /// Returns a tunnel of this type, with this port and checksum.
    pub tunnel: fn(u16, TunnelChecksum) -> Tunnel,
}

impl TunnelType {
    /// The names of all types in ipvsadm's help.
    pub const NAMES: &str = "ipip|gue|gre";

    /// All tunnel types. The record of a server stores the index in this list.
    pub const ALL: &[&Self] = &[&IPIP, &GRE, &GUE];

    /// Finds the tunnel type with this name.
    pub fn find(name: &str) -> Option<&'static Self> {
        Self::ALL.iter().copied().find(|kind| kind.name == name)
    }
}

static IPIP: TunnelType = TunnelType {
    name: "ipip",
    title: "IPIP",
    has_port: false,
    checksums: &[],
    header_len: [0; 3],
    tunnel: |_, _| Tunnel::Ipip,
};

static GRE: TunnelType = TunnelType {
    name: "gre",
    title: "GRE",
    has_port: false,
    checksums: &[TunnelChecksum::None, TunnelChecksum::Full],
    header_len: [4, 8, 4],
    tunnel: |_, checksum| Tunnel::Gre { checksum },
};

static GUE: TunnelType = TunnelType {
    name: "gue",
    title: "GUE",
    has_port: true,
    checksums: TunnelChecksum::ALL,
    // UDP, and GUE's base header.
    header_len: [8 + 4; 3],
    tunnel: |port, checksum| Tunnel::Gue { port, checksum },
};

impl Tunnel {
    /// Returns the description of the tunnel type.
    pub fn about(self) -> &'static TunnelType {
        match self {
            Self::Ipip => &IPIP,
            Self::Gre { .. } => &GRE,
            Self::Gue { .. } => &GUE,
        }
    }

    /// The UDP port; 0 for types without one.
    pub const fn port(self) -> u16 {
        match self {
            Self::Gue { port, .. } => port,
            Self::Ipip | Self::Gre { .. } => 0,
        }
    }

    /// The checksum of the outer headers; none for IPIP.
    pub const fn checksum(self) -> TunnelChecksum {
        match self {
            Self::Ipip => TunnelChecksum::None,
            Self::Gue { checksum, .. } | Self::Gre { checksum } => checksum,
        }
    }

    /// Bytes between the outer and the inner IP header.
    pub fn header_len(self) -> usize {
        self.about().header_len[self.checksum() as usize]
    }

    /// Packs the tunnel into a number.
    pub(crate) fn pack(self) -> u64 {
        let kind = TunnelType::ALL
            .iter()
            .position(|kind| kind.name == self.about().name);
        let kind = kind.unwrap_or(0) as u64;
        kind | (self.checksum() as u64) << 8 | u64::from(self.port()) << 16
    }

    /// Decodes the result of [`pack`](Self::pack).
    pub(crate) fn unpack(packed: u64) -> Self {
        // Most servers use no tunnel, and this function is called for each packet.
        if packed == 0 {
            return Self::Ipip;
        }
        let [.., high, low, checksum, kind] = packed.to_be_bytes();
        let checksum = TunnelChecksum::ALL.get(usize::from(checksum));
        let kind = TunnelType::ALL
            .get(usize::from(kind))
            .map_or(&IPIP, |kind| kind);
        (kind.tunnel)(
            u16::from_be_bytes([high, low]),
            checksum.copied().unwrap_or_default(),
        )
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    #[test]
    fn tunnel_types_are_found_by_name_and_survive_packing() {
        for (place, &checksum) in TunnelChecksum::ALL.iter().enumerate() {
            assert_eq!(checksum as usize, place);
        }
        for kind in TunnelType::ALL {
            assert_eq!(TunnelType::find(kind.name).unwrap().title, kind.title);
            let checksums = match kind.checksums {
                [] => &[TunnelChecksum::None],
                some => some,
            };
            for &checksum in checksums {
                let port = if kind.has_port { 6080 } else { 0 };
                let tunnel = (kind.tunnel)(port, checksum);
                assert_eq!(tunnel.about().name, kind.name);
                assert_eq!((tunnel.port(), tunnel.checksum()), (port, checksum));
                assert_eq!(Tunnel::unpack(tunnel.pack()), tunnel);
            }
        }
        let mut names: Vec<&str> = TunnelType::NAMES.split('|').collect();
        let mut all: Vec<&str> = TunnelType::ALL.iter().map(|kind| kind.name).collect();
        names.sort_unstable();
        all.sort_unstable();
        assert_eq!(names, all);
        assert_eq!(
            Tunnel::default().pack(),
            0,
            "the default tunnel is not packed as 0, the value in a new record"
        );
    }

    #[cfg(feature = "api")]
    #[test]
    fn tunnel_names_equal_names_in_json() {
        for kind in TunnelType::ALL {
            let tunnel = (kind.tunnel)(1, TunnelChecksum::None);
            let json = serde_json::to_value(tunnel).unwrap();
            assert_eq!(json["type"], kind.name);
        }
        for checksum in TunnelChecksum::ALL {
            assert_eq!(serde_json::to_value(checksum).unwrap(), checksum.name());
        }
    }
}

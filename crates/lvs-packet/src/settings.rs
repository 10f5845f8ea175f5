//! Settings of the dataplane that IPVS does not have. The sysctls of IPVS (`net.ipv4.vs`) are in
//! `lvs_core`.

use std::fmt;
use std::str::FromStr;

use crate::icmp_limit::Limits;

/// Settings of the dataplane that IPVS does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The limits of ICMP errors.
    pub limits: Limits,
    /// Action for echo requests to addresses that the dataplane owns.
    pub echo: Echo,
    /// The limit to which the maximum segment size in SYNs is lowered; `None` for no change.
    pub clamp_mss: Option<ClampMss>,
    /// Reverse-path check of requests to services.
    pub reverse_path: ReversePath,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            echo: Echo::default(),
            clamp_mss: None,
            reverse_path: ReversePath::Off,
        }
    }
}

impl Settings {
    /// Settings without limits of ICMP errors and echo replies, and without optional checks and
    /// changes.
    pub const UNLIMITED: Self = Self {
        limits: Limits::NONE,
        echo: Echo::Answer(u32::MAX),
        clamp_mss: None,
        reverse_path: ReversePath::Off,
    };
}

/// Whether a packet to a service is dropped if there is no suitable route to its source (RFC 3704).
/// The host's `rp_filter` does not apply to such packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReversePath {
    /// The source is not checked.
    #[default]
    Off,
    /// There must be a route to the source, by any interface.
    Loose,
    /// The route to the source must use the interface on which the packet arrived.
    Strict,
}

impl FromStr for ReversePath {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self::Off),
            "loose" => Ok(Self::Loose),
            "strict" => Ok(Self::Strict),
            _ => Err("expected off, loose or strict".to_owned()),
        }
    }
}

/// Action for echo requests to addresses that the dataplane owns. Requests to the host's own
/// addresses are left to the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Echo {
    /// The requests are answered, at most this number per second for all senders together; 0 means
    /// no limit.
    Answer(u32),
    /// Echo requests are dropped.
    Drop,
}

impl Default for Echo {
    fn default() -> Self {
        Self::Answer(1000)
    }
}

impl FromStr for Echo {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "answer" => Ok(Self::default()),
            "drop" => Ok(Self::Drop),
            _ => match text.parse() {
                Ok(0) => Ok(Self::Drop),
                Ok(number) => Ok(Self::Answer(number)),
                Err(_) => {
                    Err("use \"answer\", \"drop\", or a number of replies per second".to_owned())
                }
            },
        }
    }
}

/// The limit of the maximum segment size in SYNs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClampMss {
    /// The limit follows from the MTUs of the paths in both directions, as far as they are known.
    Auto,
    /// The limit is a fixed number of bytes.
    To(u16),
}

impl ClampMss {
    /// The smallest limit in bytes, fixed or automatic: each IPv4 host accepts segments of this
    /// size (RFC 9293 section 3.7.1).
    pub const LEAST: u16 = 536;
}

impl FromStr for ClampMss {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "auto" {
            return Ok(Self::Auto);
        }
        match text.parse() {
            Ok(size) if size >= Self::LEAST => Ok(Self::To(size)),
            _ => Err(format!(
                "use \"auto\" or a segment size from {} to {}",
                Self::LEAST,
                u16::MAX
            )),
        }
    }
}

impl fmt::Display for ClampMss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::To(size) => size.fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packet_setting_texts_are_parsed_and_invalid_texts_refused() {
        assert_eq!("auto".parse(), Ok(ClampMss::Auto));
        assert_eq!("1360".parse(), Ok(ClampMss::To(1360)));
        assert_eq!("drop".parse(), Ok(Echo::Drop));
        assert_eq!("10".parse(), Ok(Echo::Answer(10)));
        for none in ["0", "00", "+0"] {
            assert_eq!(none.parse(), Ok(Echo::Drop), "{none}");
        }
        for wrong in ["", "0", "535", "65536", "-1", "Auto"] {
            assert!(wrong.parse::<ClampMss>().is_err(), "{wrong}");
        }
        assert!("host".parse::<Echo>().is_err() && "-1".parse::<Echo>().is_err());
        assert_eq!("loose".parse(), Ok(ReversePath::Loose));
        assert!("1".parse::<ReversePath>().is_err());
    }
}

//! Filters of new connections, of one service or of the whole director: allow and deny by source
//! prefix.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::IpAddr;

use crate::Prefix;
use crate::lpm::PrefixMap;

/// Maximum number of prefixes in one filter, allowed and denied ones together. Such a filter needs
/// some 10 MB of memory.
pub const FILTER_PREFIXES_MAX: usize = 1 << 16;

/// Allowed and denied sources of new connections. The longest prefix that contains a source
/// decides; a source in no prefix is accepted if the filter has no allowed prefixes, and denied
/// otherwise.
///
/// Clones share the prefixes.
#[derive(Clone, Debug, Default)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(try_from = "FilterLists", into = "FilterLists"))]
pub struct SourceFilter(Option<Arc<Made>>);

/// The allowed and the denied prefixes of a filter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "api", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "api", serde(default))]
pub struct FilterLists {
    /// Sources that are accepted.
    #[cfg_attr(feature = "api", serde(skip_serializing_if = "Vec::is_empty"))]
    pub allow: Vec<Prefix>,
    /// Sources that are refused.
    #[cfg_attr(feature = "api", serde(skip_serializing_if = "Vec::is_empty"))]
    pub deny: Vec<Prefix>,
}

#[derive(Debug)]
struct Made {
    lists: FilterLists,
    map: PrefixMap<bool>,
}

/// The rule that has accepted or refused a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decided {
    /// A prefix of `bits` bits has accepted (`taken`) or refused the source; it is in the service's
    /// own filter (`own`) or in the director's.
    By { taken: bool, bits: u8, own: bool },
    /// No prefix contains the source. `taken`: whether the source is accepted.
    Unlisted { taken: bool },
}

impl Decided {
    pub(crate) const fn taken(self) -> bool {
        match self {
            Self::By { taken, .. } | Self::Unlisted { taken } => taken,
        }
    }

    /// Explains the decision about `source` in a sentence.
    pub(crate) fn describe(self, source: IpAddr) -> String {
        let word = if self.taken() { "allowed" } else { "denied" };
        match self {
            Self::By { bits, own, .. } => {
                let whose = if own {
                    "the service's filter"
                } else {
                    "the director's filter"
                };
                match Prefix::new(source, bits) {
                    Some(prefix) => format!("{prefix} is {word} by {whose}"),
                    None => format!("{source} is {word} by {whose}"),
                }
            }
            Self::Unlisted { taken: true } => format!("no filter contains {source}"),
            Self::Unlisted { taken: false } => {
                format!("{source} is denied: the filter allows other sources only")
            }
        }
    }
}

impl SourceFilter {
    /// A filter with these prefixes.
    ///
    /// # Errors
    /// If there are more than [`FILTER_PREFIXES_MAX`], or one is both allowed and denied.
    pub fn new(mut lists: FilterLists) -> Result<Self, String> {
        for list in [&mut lists.allow, &mut lists.deny] {
            list.sort_unstable();
            list.dedup();
        }
        let FilterLists { allow, deny } = &lists;
        let count = allow.len() + deny.len();
        if count > FILTER_PREFIXES_MAX {
            return Err(format!(
                "the filter has {count} prefixes: the maximum is {FILTER_PREFIXES_MAX}"
            ));
        }
        if count == 0 {
            return Ok(Self(None));
        }
        if let Some(both) = allow
            .iter()
            .find(|prefix| deny.binary_search(prefix).is_ok())
        {
            return Err(format!("{both} is both allowed and denied"));
        }
        let allowed = allow.iter().map(|&prefix| (prefix, true));
        let denied = deny.iter().map(|&prefix| (prefix, false));
        let map = PrefixMap::new(allowed.chain(denied));
        Ok(Self(Some(Arc::new(Made { lists, map }))))
    }

    /// Whether the filter has no prefixes, and therefore accepts every source.
    pub const fn is_off(&self) -> bool {
        self.0.is_none()
    }

    /// The filter's prefixes, sorted and without duplicates.
    pub fn lists(&self) -> FilterLists {
        self.0
            .as_ref()
            .map_or_else(FilterLists::default, |made| made.lists.clone())
    }

    /// Number of allowed prefixes, and of denied prefixes.
    pub fn counts(&self) -> (usize, usize) {
        self.0.as_ref().map_or((0, 0), |made| {
            (made.lists.allow.len(), made.lists.deny.len())
        })
    }

    /// Whether a connection from `source` is accepted, and the reason. The filters of the service
    /// and of the director apply as if they were one filter; for a prefix that is in both, the
    /// service's filter decides.
    #[inline]
    pub(crate) fn decide(&self, director: &Self, source: IpAddr) -> Decided {
        let find = |filter: &Self| filter.0.as_ref().and_then(|made| made.map.find(source));
        match (find(self), find(director)) {
            (Some((bits, taken)), Some((other, _))) if bits >= other => Decided::By {
                taken,
                bits,
                own: true,
            },
            (Some((bits, taken)), None) => Decided::By {
                taken,
                bits,
                own: true,
            },
            (_, Some((bits, taken))) => Decided::By {
                taken,
                bits,
                own: false,
            },
            (None, None) => Decided::Unlisted {
                taken: self.counts().0 == 0 && director.counts().0 == 0,
            },
        }
    }
}

impl PartialEq for SourceFilter {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other) || one.lists == other.lists,
            _ => false,
        }
    }
}

impl Eq for SourceFilter {}

impl TryFrom<FilterLists> for SourceFilter {
    type Error = String;

    fn try_from(lists: FilterLists) -> Result<Self, String> {
        Self::new(lists)
    }
}

impl From<SourceFilter> for FilterLists {
    fn from(filter: SourceFilter) -> Self {
        filter.lists()
    }
}

/// Reads prefixes from a file: separated by whitespace and line ends; text after a `#` is ignored.
///
/// # Errors
/// The number of the first invalid line, from 1, and the reason.
pub fn parse_prefixes(text: &str) -> Result<Vec<Prefix>, (usize, String)> {
    let mut all = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let words = line.split('#').next().unwrap_or("").split_whitespace();
        for word in words {
            all.push(word.parse().map_err(|error| (number + 1, error))?);
        }
    }
    Ok(all)
}

#[derive(Debug, Default)]
pub(crate) struct Filters {
    pub(crate) director: SourceFilter,
    pub(crate) services: BTreeMap<u32, SourceFilter>,
}

impl Filters {
    /// Decides whether `source` may open a connection to a service; `None` if no filter applies.
    #[inline]
    pub(crate) fn decide(&self, service: u32, source: IpAddr) -> Option<Decided> {
        const NONE: SourceFilter = SourceFilter(None);
        let own = self.services.get(&service).unwrap_or(&NONE);
        (!own.is_off() || !self.director.is_off()).then(|| own.decide(&self.director, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filter(allow: &str, deny: &str) -> SourceFilter {
        let lists = FilterLists {
            allow: parse_prefixes(allow).unwrap(),
            deny: parse_prefixes(deny).unwrap(),
        };
        SourceFilter::new(lists).unwrap()
    }

    #[test]
    fn filter_longest_prefix_wins_and_service_precedes_director() {
        let own = filter("198.51.100.0/24 2001:db8::/32", "198.51.100.7 10.0.0.0/8");
        let director = filter("10.1.0.0/16 198.51.100.7", "0.0.0.0/0 198.51.100.128/25");
        for (source, taken, why) in [
            (
                "198.51.100.1",
                true,
                "198.51.100.0/24 is allowed by the service's filter",
            ),
            (
                "198.51.100.7",
                false,
                "198.51.100.7 is denied by the service's filter",
            ),
            (
                "198.51.100.200",
                false,
                "198.51.100.128/25 is denied by the director's filter",
            ),
            (
                "10.1.2.3",
                true,
                "10.1.0.0/16 is allowed by the director's filter",
            ),
            (
                "10.2.2.3",
                false,
                "10.0.0.0/8 is denied by the service's filter",
            ),
            (
                "203.0.113.1",
                false,
                "0.0.0.0/0 is denied by the director's filter",
            ),
            (
                "2001:db8::1",
                true,
                "2001:db8::/32 is allowed by the service's filter",
            ),
            (
                "2001:db9::1",
                false,
                "2001:db9::1 is denied: the filter allows other sources only",
            ),
        ] {
            let addr = source.parse().unwrap();
            let decided = own.decide(&director, addr);
            assert_eq!(
                (decided.taken(), &*decided.describe(addr)),
                (taken, why),
                "{source}"
            );
        }
        let deny = filter("", "10.0.0.0/8");
        let nothing = SourceFilter::default();
        assert!(deny.decide(&nothing, [192, 0, 2, 1].into()).taken());
        assert!(!nothing.decide(&deny, [10, 0, 2, 1].into()).taken());
    }

    #[test]
    fn filter_refuses_invalid_contradictory_or_too_many_prefixes_and_ignores_order() {
        assert_eq!(
            parse_prefixes("10.0.0.0/8 # ours\n\n::1 192.0.2.1\n")
                .unwrap()
                .len(),
            3
        );
        assert_eq!(parse_prefixes("10.0.0.0/8\nx\n").unwrap_err().0, 2);
        let prefix: Prefix = "10.0.0.0/8".parse().unwrap();
        let both = FilterLists {
            allow: [prefix].into(),
            deny: [prefix].into(),
        };
        assert!(SourceFilter::new(both).unwrap_err().contains("both"));
        let prefixes = |n: u32| (0..n).map(|n| Prefix::new(IpAddr::V4(n.into()), 32).unwrap());
        let lists = |denied: u32| FilterLists {
            allow: [prefix].into(),
            deny: prefixes(denied).collect(),
        };
        let most = SourceFilter::new(lists(0xffff)).unwrap();
        assert_eq!(most.counts(), (1, 0xffff));
        let output = SourceFilter::new(lists(0x1_0000)).unwrap_err();
        assert!(output.contains("the maximum is 65536"), "{output}");
        assert_eq!(filter("", ""), SourceFilter::default());
        assert_eq!(
            filter("10.0.0.1 10.0.0.2", ""),
            filter("10.0.0.2 10.0.0.1 10.0.0.2", "")
        );
    }
}

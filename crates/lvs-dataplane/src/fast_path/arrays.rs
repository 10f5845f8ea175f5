//! The BPF maps that the programs and the dataplane share.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lvs_core::memory::Layout;

use super::error::{FastPathError, step};
use super::growing::Growing;
use super::layout::{
    ABOUT_WORDS, COUNT_WORDS, HOP_WORDS, HOPS, RULE_WORDS, RULES, SERVERS, SHARE_WORDS,
    TUNNEL_WORDS, conf,
};
use super::pins::Maps;
use crate::warm_restart::{KEPT_WORDS, text_words};
use lvs_sys::SharedArray;

/// Initial size in bytes of each of the two areas for services and settings.
const SAVED_FIRST: usize = 256 << 10;

/// Returns the number of entries of a map with `entries` entries for each of `workers`. Returns an
/// error if the slots of all entries cannot be numbered with 31 bits, as the dataplane requires.
fn entries_of_all(entries: u32, workers: NonZeroUsize) -> Result<u32, FastPathError> {
    const MOST: usize = (1 << 31) / Layout::WAYS;
    let all = (entries as usize).saturating_mul(workers.get());
    let all = u32::try_from(all).ok().filter(|&all| all as usize <= MOST);
    all.ok_or(FastPathError::Setting {
        why: "the connection tables of all packet workers have more slots than the BPF programs can number",
        fix: "use a smaller --max-connections, or fewer --workers",
    })
}

/// Defines [`Arrays`] from the field, name, words for each entry and number of entries of each
/// array.
macro_rules! arrays {
    (
        ($layout:ident, $processors:ident, $all:ident);
        $($field:ident: $name:literal, $words:expr, $entries:expr;)*
    ) => {
        #[derive(Debug)]
        pub(super) struct Arrays {
            $(pub(super) $field: Arc<SharedArray>,)*
            /// Counters of servers, for a successor.
            pub(super) kept: Growing,
            /// Services and settings, for a successor.
            pub(super) saved: Growing,
        }

        impl Arrays {
            /// Creates the arrays, or opens the arrays of the predecessor. The arrays of the
            /// connection table have a region for each of `workers`.
            pub(super) fn new(
                $layout: &Layout,
                workers: NonZeroUsize,
                $processors: u32,
                maps: Maps<'_>,
            ) -> Result<Self, FastPathError> {
                let $all = |entries: u32| entries_of_all(entries, workers);
                let growing = |name, entry, entries| {
                    Growing::new(name, entry, entries, maps).map_err(step("allocate memory"))
                };
                let saved = u32::try_from(text_words(SAVED_FIRST)).unwrap_or(u32::MAX);
                Ok(Self {
                    $($field: array($name, $words, $entries, maps)?,)*
                    kept: growing("lvs_kept", KEPT_WORDS, SERVERS)?,
                    saved: growing("lvs_saved", 1, saved)?,
                })
            }

            /// The arrays that do not grow, with their names.
            pub(super) fn all(&self) -> impl Iterator<Item = (&'static str, &SharedArray)> {
                [$(($name, &*self.$field)),*].into_iter()
            }

            /// Resets all arrays to zero. Returns `None` if one is still in use.
            #[cfg(any(test, feature = "testing"))]
            pub(super) fn zero(&mut self) -> Option<()> {
                $(Arc::get_mut(&mut self.$field)?.zero();)*
                self.kept.zero()?;
                self.saved.zero()
            }
        }
    };
}

arrays! {
    (layout, processors, all);
    about: "lvs_about", ABOUT_WORDS, 1;
    conf: "lvs_conf", conf::WORDS, 1;
    narrow: "lvs_narrow", Layout::WAYS * Layout::NARROW_WORDS, all(layout.narrow_buckets)?;
    narrow_tags: "lvs_narrow_tags", 1, all(layout.narrow_buckets)?;
    wide: "lvs_wide", Layout::WAYS * Layout::WIDE_WORDS, all(layout.wide_buckets)?;
    wide_tags: "lvs_wide_tags", 1, all(layout.wide_buckets)?;
    overflow: "lvs_overflow", Layout::WIDE_WORDS, all(layout.overflow_slots)?;
    hops: "lvs_hops", HOP_WORDS, HOPS.into();
    servers: "lvs_servers", 1, SERVERS;
    tunnels: "lvs_tunnels", TUNNEL_WORDS, SERVERS;
    counts: "lvs_counts", COUNT_WORDS, SERVERS * processors;
    shares: "lvs_shares", SHARE_WORDS, processors;
    rules: "lvs_rules", RULE_WORDS * RULES as usize, 1;
}

/// Creates one array, or opens the predecessor's array.
fn array(
    name: &'static str,
    words: usize,
    entries: u32,
    maps: Maps<'_>,
) -> Result<Arc<SharedArray>, FastPathError> {
    let array = match maps {
        Maps::New | Maps::Pinned(_) => SharedArray::new(name, words, entries),
        Maps::Found(pins) => SharedArray::pinned(&pins.path(name), words * entries.max(1) as usize),
    };
    array.map(Arc::new).map_err(step("allocate memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_regions_above_the_maximum_of_entries_are_refused() {
        let of = |entries, workers| {
            let workers = NonZeroUsize::new(workers).expect("at least one worker exists");
            entries_of_all(entries, workers).ok()
        };
        assert_eq!(of(154_203, 1), Some(154_203));
        assert_eq!(of(154_203, 64), Some(64 * 154_203));
        assert_eq!(of(1 << 22, 64), Some(1 << 28));
        assert_eq!((of((1 << 22) + 1, 64), of(u32::MAX, 64)), (None, None));
    }
}

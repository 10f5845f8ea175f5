//! Identifiers of events in the journal (`MESSAGE_ID=`, systemd.journal-fields(7)): constant random
//! numbers, which stay the same if the text of a message changes.

/// Each event of `lvsd` that has a record in the journal, and the identifier of the event.
pub const MESSAGE_IDS: &[(&str, &str)] = &[
    ("server_up", "36f5a3ebd51643a7b41151dd8e1cffae"),
    ("server_down", "41b20cfdc549487e95784ad72b10d6b3"),
    ("server_suspicious", "c94b81e34d324bdebd556ca4761ecd79"),
    ("server_answers", "1642d7af45724b1dae1a5ec0f6a49815"),
    ("quorum_lost", "565d4b57d39e409f842df9a14d857423"),
    ("quorum_gained", "3ef6e718d7f14b5a934620af087cdfcf"),
    ("sorry_on", "8a32ff52b61645799b41c27b53fe5b51"),
    ("sorry_off", "b3c6481b34aa43788367047b51317f46"),
    ("panic_on", "b9b634fa3269472a92b9bb1200b1671d"),
    ("panic_off", "b4efc827b27749b8804ebe14557fedd4"),
    ("vip_withdrawn", "a03f1a82ec534253b976ad468a29ca0b"),
    ("vip_owned", "64261fc00a3043e7988f15726403a1a3"),
    ("admin", "e4e4f5d987124f59930d0184d9204f8d"),
    ("drift", "c94234d9574e4e9bbb90d5c2d8d16e30"),
    ("reloaded", "03f750b678fb4aa5ae6e6c970b293665"),
    ("reload_refused", "22efffd6c1a1403ba9970e36458d3440"),
    ("dataplane_found", "29e59f78c8fe4588853a4d8ac745dfdb"),
    ("dataplane_lost", "06b6cedef23e4bdead94caf9a7c5b67f"),
];

/// The identifier of an event in the journal; `None` if it has none.
pub(super) fn message_id(event: &str) -> Option<&'static str> {
    let known = MESSAGE_IDS.iter().find(|(name, _)| *name == event);
    known.map(|(_, id)| *id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_ids_are_distinct_hexadecimal_and_documented() {
        let page = include_str!("../../../../docs/operating.md");
        let mut all: Vec<_> = MESSAGE_IDS.iter().map(|(_, id)| *id).collect();
        for (event, id) in MESSAGE_IDS {
            assert!(id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()));
            assert!(page.contains(&format!("| `{event}` | `{id}` |")), "{event}");
        }
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), MESSAGE_IDS.len());
    }
}

//! Checks `[announce]`, and services whose addresses are announced by routes.

use std::time::Duration;

use toml::Spanned;

use super::Checker;
use crate::config::raw::{RawConfig, RawDuration};
use crate::config::{Announce, Service, VipMode};
use crate::text::Diagnostic;

/// Longest time for which routers prefer other directors before an address is withdrawn.
const DRAIN_MAX: Duration = Duration::from_secs(3600);
/// The permitted values of `hold_without_lvsd`: the time for which the dataplane continues to
/// announce without messages from lvsd.
const HOLD: std::ops::RangeInclusive<Duration> =
    Duration::from_secs(15)..=Duration::from_secs(7 * 24 * 3600);

impl Checker<'_> {
    pub(super) fn announce(&mut self, raw: &RawConfig, services: &[Service]) -> Announce {
        let announced = |service: &&Service| service.vip == VipMode::Announce;
        let any = services.iter().any(|service| announced(&service));
        let mut settings = Announce::default();
        if let Some(table) = &raw.announce {
            if !any && self.complete {
                self.report(
                    Diagnostic::warning(table.span(), "no address is announced")
                        .help("set vip = \"announce\" for services, or remove [announce]"),
                );
            }
            let table = table.get_ref();
            if let Some(drain) = self.announce_time(
                table.withdraw_delay.as_ref(),
                "`withdraw_delay`",
                Duration::ZERO..=DRAIN_MAX,
                "use \"0s\" to \"1h\": the time for which routers prefer other directors before an address is withdrawn",
            ) {
                settings.drain = drain;
            }
            if let Some(hold) = self.announce_time(
                table.hold_without_lvsd.as_ref(),
                "`hold_without_lvsd`",
                HOLD,
                "use \"15s\" to \"7d\": the time for which a dataplane without messages from lvsd continues to announce",
            ) {
                settings.hold = hold;
            }
        }
        if !any {
            return settings;
        }
        for (service, place) in services.iter().zip(&raw.service) {
            let Some(vip) = &place.get_ref().vip else {
                continue;
            };
            let servers = service.servers.iter().map(|server| &server.config);
            let mut servers = servers.chain(service.discovery.iter().map(|one| &one.config));
            let nat = servers.any(|config| config.forwarding == lvs_core::Forwarding::Nat);
            if service.vip == VipMode::Announce && nat {
                self.report(
                    Diagnostic::warning(
                        vip.span(),
                        "with NAT, replies must return through the director that has the connection",
                    )
                    .help("use \"dr\", \"tun\" or \"fullnat\" if several directors announce the address at the same time"),
                );
                break;
            }
        }
        if raw.sync.peers.is_none()
            && let Some(vip) = raw.service.iter().find_map(|service| {
                let vip = service.get_ref().vip.as_ref()?;
                (vip.get_ref() == "announce").then_some(vip)
            })
        {
            self.report(
                Diagnostic::warning(
                    vip.span(),
                    "the directors share no connections: some connections break whenever routers redistribute packets",
                )
                .help("add [sync.peers] with addresses and key_file"),
            );
        }
        settings
    }

    fn announce_time(
        &mut self,
        value: Option<&Spanned<RawDuration>>,
        name: &str,
        range: std::ops::RangeInclusive<Duration>,
        help: &str,
    ) -> Option<Duration> {
        let value = value?;
        let time = value.get_ref().0;
        if range.contains(&time) && time.subsec_nanos() == 0 {
            return Some(time);
        }
        let title = match range.contains(&time) {
            true => format!("{name} is not a whole number of seconds"),
            false => format!("{name} is out of range"),
        };
        self.report(Diagnostic::error(value.span(), title).help(help));
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::config::{Config, VipMode};
    use crate::expand::expand;
    use crate::sources::Gathered;

    const SERVICE: &str = "[[service]]\naddress = \"192.0.2.10:80\"\nvip = \"announce\"\nforward = \"dr\"\ncheck = \"none\"\n\
                           [[service.server]]\naddress = \"192.0.2.11:80\"\n";
    const SYNC: &str =
        "[sync.peers]\naddresses = [\"192.0.2.2\"]\nkey_file = \"/etc/lvs/sync.key\"\n";

    #[test]
    fn dataplane_owns_no_announced_vips_and_announce_keys_are_read() {
        let (config, report) = Config::from_toml("x", &format!("{SYNC}{SERVICE}")).unwrap();
        assert_eq!(config.services[0].vip, VipMode::Announce);
        assert!(
            expand(&config, &Gathered::default())
                .own_vips(|_| false)
                .is_empty()
        );
        assert_eq!(config.announce.drain, Duration::from_secs(5));
        assert_eq!(config.announce.hold, Duration::from_secs(600));
        assert!(report.findings.is_empty(), "{report}");
        let text = format!(
            "[announce]\nwithdraw_delay = \"0s\"\nhold_without_lvsd = \"1h\"\n{SYNC}{SERVICE}"
        );
        let (config, _) = Config::from_toml("x", &text).unwrap();
        assert_eq!(config.announce.drain, Duration::ZERO);
        assert_eq!(config.announce.hold, Duration::from_secs(3600));
    }

    #[test]
    fn contradictory_or_out_of_range_announce_settings_are_reported() {
        for (text, words) in [
            (SERVICE.to_owned(), "share no connections"),
            (
                format!("{SYNC}{}", SERVICE.replace("\"dr\"", "\"nat\"")),
                "return through the director",
            ),
            (
                format!(
                    "[announce]\n{}",
                    SERVICE.replace("vip = \"announce\"\n", "")
                ),
                "no address is announced",
            ),
        ] {
            let (_, report) = Config::from_toml("x", &text).unwrap();
            let report = report.to_string();
            assert!(report.contains(words), "{text}: no {words:?} in {report}");
        }
        for (keys, words) in [
            ("withdraw_delay = \"2h\"", "out of range"),
            ("hold_without_lvsd = \"1s\"", "out of range"),
            (
                "hold_without_lvsd = \"20500ms\"",
                "not a whole number of seconds",
            ),
        ] {
            let text = format!("[announce]\n{keys}\n{SYNC}{SERVICE}");
            let report = Config::from_toml("x", &text).expect_err(keys).to_string();
            assert!(report.contains(words), "{keys}: no {words:?} in {report}");
        }
        let two = format!(
            "{SYNC}{SERVICE}{}",
            SERVICE.replace(":80", ":443").replace("announce", "own")
        );
        let report = Config::from_toml("x", &two).unwrap_err().to_string();
        assert!(
            report.contains("the same `vip`"),
            "no \"the same `vip`\" in {report}"
        );
    }
}

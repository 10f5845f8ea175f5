//! Settings for missing servers: quorum, panic mode, sorry server.

use lvs_core::api::ServiceId;
use toml::Spanned;

use super::Checker;
use super::sense::ServerPlace;
use super::server::ServerDefaults;
use crate::config::raw::{RawQuorum, RawService, RawTarget};
use crate::config::{BelowQuorum, Quorum, Server};
use crate::text::Diagnostic;

/// Maximum quorum: no service has more servers.
const QUORUM_MAX: i64 = 65_536;

impl Checker<'_> {
    pub(super) fn quorum(&mut self, raw: &RawService) -> Quorum {
        let Some(quorum) = &raw.quorum else {
            return Quorum::default();
        };
        let servers = raw.server.len();
        let bound = 1..=QUORUM_MAX;
        let quorum_of = |up: i64, down: i64| Quorum {
            up: u32::try_from(up).unwrap_or(1),
            down: u32::try_from(down).unwrap_or(1),
        };
        let read = match quorum.get_ref() {
            RawQuorum::Number(number) => {
                let spanned = Spanned::new(quorum.span(), *number);
                let up = self.number(Some(&spanned), "quorum", bound).unwrap_or(1);
                quorum_of(up, up)
            }
            RawQuorum::Table(table) => {
                let Some(up) = &table.up else {
                    self.report(
                        Diagnostic::error(quorum.span(), "`up` of the quorum is missing")
                            .help("write { up = 3, down = 2 }, or a number for both"),
                    );
                    return Quorum::default();
                };
                let most = self.number(Some(up), "`up`", bound.clone()).unwrap_or(1);
                let least = self.number(table.down.as_ref(), "`down`", bound);
                let least = least.unwrap_or(most);
                if let Some(down) = &table.down
                    && least > most
                {
                    self.report(
                        Diagnostic::error(
                            down.span(),
                            format!("`down` ({least}) is above `up` ({most})"),
                        )
                        .context(up.span(), "the quorum is reached at this number")
                        .help("the quorum is lost below `down` servers, which is at most `up`"),
                    );
                }
                quorum_of(most, least)
            }
        };
        if self.complete && servers > 0 && usize::try_from(read.up).is_ok_and(|up| up > servers) {
            self.report(
                Diagnostic::warning(
                    quorum.span(),
                    format!(
                        "the quorum is {}, and the service has {}",
                        read.up,
                        lvs_api::words::counted(servers, "server")
                    ),
                )
                .label("the quorum is never reached")
                .help("use at most the number of servers"),
            );
        }
        read
    }

    pub(super) fn below_quorum(&mut self, raw: &RawService, id: Option<ServiceId>) -> BelowQuorum {
        let words = [
            ("keep", BelowQuorum::Keep),
            ("give-up", BelowQuorum::GiveUp),
        ];
        let below = self
            .word(raw.below_quorum.as_ref(), &words)
            .unwrap_or_default();
        if let (Some(at), BelowQuorum::GiveUp) = (&raw.below_quorum, below) {
            let host = raw.vip.as_ref().is_some_and(|vip| vip.get_ref() == "host");
            let mark = matches!(id, Some(ServiceId::Fwmark { .. })) && raw.address.is_none();
            if host || mark {
                self.report(
                    Diagnostic::error(
                        at.span(),
                        "the dataplane cannot release an address that it does not own",
                    )
                    .help("remove this line; `notify` can inform the owner of the address"),
                );
            }
        }
        below
    }

    pub(super) fn min_share(&mut self, raw: &RawService) -> u8 {
        let percent = self.number(raw.panic_below.as_ref(), "`panic_below`", 0..=100);
        percent
            .and_then(|percent| u8::try_from(percent).ok())
            .unwrap_or(0)
    }

    /// Returns the sorry server, an ordinary server with weight 1 by default, and reports errors in
    /// it.
    pub(super) fn sorry(
        &mut self,
        raw: &RawService,
        id: Option<ServiceId>,
        defaults: &ServerDefaults,
        servers: &[Server],
    ) -> Option<Server> {
        let sorry = raw.sorry.as_ref()?;
        let id = id?;
        let server = RawTarget::server(sorry);
        let address = server.get_ref().address.as_ref();
        let place = address.map_or(sorry.span(), Spanned::span);
        // The sorry server has no check, because no other server could replace it.
        let defaults = ServerDefaults {
            forward: defaults.forward,
            tunnel: defaults.tunnel,
            check: None,
        };
        let mut checked = self.server(&server, raw, &id, &defaults)?;
        if servers
            .iter()
            .any(|server| server.address == checked.address)
        {
            self.report(
                Diagnostic::error(place, "the sorry server is a server of the service")
                    .help("use another address; this server is used only while too few of the other servers are usable"),
            );
            return None;
        }
        self.servers.push(ServerPlace {
            service: id,
            address: checked.address,
            place,
        });
        checked.check = None;
        Some(checked)
    }
}

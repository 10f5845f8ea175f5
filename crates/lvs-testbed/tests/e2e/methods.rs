//! NAT, direct routing, tunnelling and full NAT with the same traffic.

macro_rules! method {
    ($name:ident, $forward:ident) => {
        mod $name {
            use anyhow::Result;
            use lvs_testbed::{Forward, SiteOptions};

            use crate::common;

            fn options(what: &str, servers: usize) -> SiteOptions {
                let label = format!("{}-{what}", stringify!($name));
                SiteOptions::with_servers(&label, Forward::$forward, servers)
            }

            #[test]
            fn each_forwarding_method_transfers_all_bytes_and_lists_connections() -> Result<()> {
                let site = common::site(options("http", 4))?;
                common::requests_and_listings(&site)?;
                site.lvsadm("-C")?;
                common::schedulers(&site)
            }

            #[test]
            fn each_forwarding_method_forwards_bulk_iperf_and_dns() -> Result<()> {
                let site = common::site(options("bulk", 2))?;
                site.add_service(80, "rr")?;
                common::bulk(&site)?;
                common::iperf_and_dns(&site)
            }

            #[test]
            fn new_connections_use_added_servers_and_avoid_removed_servers() -> Result<()> {
                common::administration(&common::site(options("admin", 3))?)
            }
        }
    };
}

method!(nat, Nat);
method!(dr, Dr);
method!(tun, Tun);
method!(fullnat, FullNat);

//! `lvsadm local`: the local addresses of full NAT.

use std::net::IpAddr;

use lvs_core::api::{Call, LocalAddressInfo, LocalInfo, LocalPool};

use super::{Outcome, Trouble, Words, connect};
use crate::invocation::Invocation;
use crate::session::json_list;

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let free: Vec<&str> = words.free.iter().map(String::as_str).collect();
    match free[..] {
        ["list"] | [] => list(run),
        ["add", ref added @ ..] if !added.is_empty() => {
            let added = addresses(added)?;
            change(run, |pool| {
                pool.addresses.extend(added);
                Ok(())
            })
        }
        ["del", ref gone @ ..] if !gone.is_empty() => {
            let gone = addresses(gone)?;
            change(run, |pool| {
                if let Some(unknown) = gone.iter().find(|addr| !pool.addresses.contains(addr)) {
                    return Err(Trouble::Usage(format!(
                        "{unknown} is not a local address; `lvsadm local` lists the local addresses"
                    )));
                }
                pool.addresses.retain(|addr| !gone.contains(addr));
                Ok(())
            })
        }
        ["hairpin", on @ ("on" | "off")] => change(run, |pool| {
            pool.hairpin = on == "on";
            Ok(())
        }),
        _ => Err(Trouble::Usage(
            "expected list, add ADDRESS..., del ADDRESS..., or hairpin on|off".into(),
        )),
    }
}

fn addresses(words: &[&str]) -> Result<Vec<IpAddr>, Trouble> {
    let read = |word: &&str| {
        word.parse()
            .map_err(|_| Trouble::Usage(format!("{word}: expected an IP address")))
    };
    words.iter().map(read).collect()
}

/// Reads the pool, changes it and writes it back.
fn change(
    run: &mut Invocation<'_>,
    change: impl FnOnce(&mut LocalPool) -> Result<(), Trouble>,
) -> Outcome {
    let mut client = connect(run)?;
    let now: LocalInfo = client.call(&Call::LocalGet {})?;
    let mut pool = LocalPool {
        addresses: now.addresses.iter().map(|local| local.address).collect(),
        hairpin: now.hairpin,
    };
    change(&mut pool)?;
    super::change(run, &mut client, &Call::LocalSet(pool))?;
    Ok(0)
}

fn list(run: &mut Invocation<'_>) -> Outcome {
    let info: LocalInfo = connect(run)?.call(&Call::LocalGet {})?;
    if run.json {
        json_list(run, &info.addresses)?;
        return Ok(0);
    }
    if info.addresses.is_empty() {
        writeln!(run.output, "no local addresses")?;
    }
    for LocalAddressInfo {
        address,
        first,
        last,
        connections,
    } in info.addresses
    {
        writeln!(
            run.output,
            "{address}  ports {first}-{last}  {connections} connections"
        )?;
    }
    let hairpin = if info.hairpin { "on" } else { "off" };
    writeln!(run.output, "hairpin {hairpin}")?;
    Ok(0)
}

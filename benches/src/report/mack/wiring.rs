//! Adds hosts to the usual three: a switch, and a second server.

use anyhow::Result;
use lvs_testbed::{Host, decap, programs, wait_until};
use std::time::Duration;

use crate::compare::bed::{BACK_MAC, Bed, CLIENT_MAC, FRONT_MAC, SERVER_MAC, VIP};
use crate::compare::contender::{Contender, Method};

/// The virtual address of a service with port 0.
pub(super) const SECOND_VIP: &str = "10.73.0.2";
/// Address of the second server.
pub(super) const SECOND: &str = "10.72.0.12";
const SECOND_MAC: &str = "02:00:00:00:05:01";

/// Inserts a switch between the director and both endpoints. `one`: removes the director's
/// interface towards the servers, and puts client and server on one network instead of two.
pub(super) fn switch(bed: &mut Bed, one: bool) -> Result<()> {
    let switch = bed.add_host("switch")?;
    let bridge = if one { "b0" } else { "b1" };
    bed.devices[0] = plug(bed, &bed.client, &switch, &bed.devices[0], CLIENT_MAC, "b0")?;
    bed.devices[3] = plug(
        bed,
        &bed.server,
        &switch,
        &bed.devices[3],
        SERVER_MAC,
        bridge,
    )?;
    let [c, d, e, s] = bed.devices.clone();
    let end = |address: &str, gateway: &str, device: &str, mac: &str| {
        format!(
            "ip addr add {address}/24 dev {device}\n\
             ip neigh replace {gateway} lladdr {mac} dev {device} nud permanent\n\
             ip route replace default via {gateway}\n"
        )
    };
    let back = if one { FRONT_MAC } else { BACK_MAC };
    bed.client
        .sh(&end("10.71.0.2", "10.71.0.1", &c, FRONT_MAC))?;
    bed.server.sh(&end("10.72.0.11", "10.72.0.1", &s, back))?;
    for host in 12..=14 {
        bed.server
            .sh(&format!("ip addr add 10.72.0.{host}/24 dev {s}"))?;
    }
    if !one {
        return Ok(());
    }
    let mut script = format!("ip link del {e}\nip addr add 10.72.0.1/24 dev {d}\n");
    for host in 11..=14 {
        script +=
            &format!("ip neigh replace 10.72.0.{host} lladdr {SERVER_MAC} dev {d} nud permanent\n");
    }
    bed.director.sh(&script)?;
    if let Contender::AfPacket(method) = bed.who {
        restart(bed, &[d.as_str()], &[], &bed.rules(method)?)?;
    }
    if bed.who == Contender::AfPacket(Method::Dr) {
        // Client and server are on one network, so the server sends replies to the client directly.
        bed.server.sh(&format!(
            "ip route replace 10.71.0.0/24 dev {s}\nip neigh replace 10.71.0.2 lladdr {CLIENT_MAC} dev {s} nud permanent"
        ))?;
    }
    Ok(())
}

/// Moves `device` from an endpoint to the switch, as a port of `bridge`, and connects the endpoint
/// to `bridge` by a new veth pair. Returns the name of the endpoint's new device.
fn plug(
    bed: &Bed,
    host: &Host,
    switch: &Host,
    device: &str,
    mac: &str,
    bridge: &str,
) -> Result<String> {
    let (new, port) = (format!("n{device}"), format!("p{device}"));
    host.sh(&format!("ip link set {device} netns {}", switch.pid()))?;
    switch.sh(&format!(
        "ip link show {bridge} >/dev/null 2>&1 || ip link add {bridge} type bridge\n\
         ip link set {device} address 02:00:00:00:0e:{:02x}\n\
         ip link set {device} master {bridge} up\n\
         ip link add {port} numtxqueues 1 numrxqueues 1 type veth \
         peer name {new} address {mac} netns {} numtxqueues 1 numrxqueues 1\n\
         ip link set {port} master {bridge} up\nip link set {bridge} up\n",
        device.bytes().next().unwrap_or(0),
        host.pid()
    ))?;
    host.sh(&format!("ip link set {new} up\nethtool -K {new} gro on"))?;
    bed.receive_in_thread(host, &new)?;
    Ok(new)
}

/// Adds a second server with its own MAC address, on the network of the first. Both have the
/// virtual addresses.
pub(super) fn second_server(bed: &mut Bed) -> Result<Host> {
    let second = bed.add_host("second")?;
    let switch = bed.add_host("switch")?;
    bed.devices[3] = plug(bed, &bed.server, &switch, &bed.devices[3], SERVER_MAC, "b0")?;
    let [_, _, e, s] = bed.devices.clone();
    switch.sh(&format!(
        "ip link add ps numtxqueues 1 numrxqueues 1 type veth \
         peer name s address {SECOND_MAC} netns {} numtxqueues 1 numrxqueues 1\n\
         ip link set ps master b0 up\n",
        second.pid()
    ))?;
    let end = |address: &str, device: &str| {
        format!(
            "ip addr add {address}/24 dev {device}\nip link set {device} up\nethtool -K {device} gro on\n\
             sysctl -qw net.ipv4.tcp_tw_reuse=1 net.core.somaxconn=8192\n\
             ip addr replace {VIP}/32 dev lo\nip addr replace {SECOND_VIP}/32 dev lo\n\
             ip neigh replace 10.72.0.1 lladdr {BACK_MAC} dev {device} nud permanent\n\
             ip route replace default via 10.72.0.1\n"
        )
    };
    bed.server.sh(&end("10.72.0.11", &s))?;
    second.sh(&end(SECOND, "s"))?;
    bed.director.sh(&format!(
        "ip neigh replace {SECOND} lladdr {SECOND_MAC} dev {e} nud permanent\n\
         if ip addr show dev lo | grep -q {VIP}; then ip addr add {SECOND_VIP}/32 dev lo; fi\n"
    ))?;
    if let Contender::AfPacket(method @ (Method::Dr | Method::Tunnel)) = bed.who {
        // The second server, too, sends replies over a separate link.
        bed.client.sh(&format!(
            "ip link add x2 type veth peer name y2 netns {}\n\
             ip addr add 10.75.0.2/24 dev x2\nip link set x2 up\nethtool -K x2 gro on\n\
             sysctl -qw net.ipv4.conf.x2.rp_filter=0\n",
            second.pid()
        ))?;
        second.sh("ip addr add 10.75.0.1/24 dev y2\nip link set y2 up\n\
             ip route replace 10.71.0.0/24 via 10.75.0.2 dev y2\n")?;
        if method == Method::Tunnel {
            bed.keep(decap::start(&second)?);
        }
    }
    Ok(second)
}

/// Restarts the dataplane at some interfaces, with more options and other rules.
pub(super) fn restart(
    bed: &mut Bed,
    interfaces: &[&str],
    more: &[&str],
    rules: &str,
) -> Result<()> {
    let dataplane = programs::find("lvs-dataplane")?.display().to_string();
    let lvsadm = programs::find("lvsadm")?;
    bed.run_instead(|host, cpu| {
        let mut words = vec!["-c", cpu, &dataplane, "--backend", "af_packet"];
        words.extend(["--fast-path", "off"]);
        for interface in interfaces {
            words.extend(["--interface", interface]);
        }
        words.extend(more);
        host.spawn("taskset", &words)
    })?;
    let director = &bed.director;
    wait_until(
        "the dataplane to answer on its control socket",
        Duration::from_secs(10),
        || director.run(&lvsadm, &["-Ln"]).is_ok(),
    )?;
    lvs_testbed::netns::run_with_input(director.command(&lvsadm).arg("-R"), rules)?;
    Ok(())
}

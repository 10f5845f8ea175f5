//! Options of the dataplane, sysctls, synchronisation and filters.

use super::*;

#[test]
fn dataplane_keys_become_options_and_invalid_values_are_refused() {
    let text = "[dataplane]\ninterface = [\"eth0.100\", \"eth1\"]\necho = 10\n\
                clamp_mss = 1360\nicmp_limit = 0\n";
    assert_eq!(
        load(text)
            .dataplane
            .arguments()
            .collect::<Vec<_>>()
            .join(" "),
        "--clamp-mss 1360 --echo 10 --icmp-limit 0 --interface eth0.100 --interface eth1"
    );
    for [line, wanted] in cases(
        r#"
            echo = "host" | `host` is not a valid value of `echo`
            hang_limit = "1s" | this time is too short or too long to detect a hang
            clamp_mss = 535 | `535` is not a segment size
            clamp_mss = "Auto" | `Auto` is not a segment size
            icmp_limit = -1 | is out of range
            echo = -1 | `-1` is not a valid value of `echo`
            interface = "eth0.100=10.0.0.1/24" | the dataplane does not create `eth0.100`
        "#,
    ) {
        let found = errors(&format!("[dataplane]\n{line}\n"));
        assert!(found.contains(wanted), "{line}: no {wanted:?} in {found}");
    }
}

#[test]
fn helper_ftp_is_accepted_and_invalid_ports_or_other_helpers_are_refused() {
    for (line, arguments) in [
        ("helper = \"ftp\"", "--helper ftp"),
        ("helper = [\"ftp=21,2121\"]", "--helper ftp=21,2121"),
    ] {
        let text = format!("[dataplane]\n{line}\n");
        assert_eq!(
            load(&text)
                .dataplane
                .arguments()
                .collect::<Vec<_>>()
                .join(" "),
            arguments
        );
    }
    for (helper, wanted) in [
        (
            "tftp",
            "there is no helper of this name; the only helper is ftp",
        ),
        ("ftp=", "up to 8 different ports from 1 to 65535"),
        ("ftp=0", "up to 8 different ports"),
        ("ftp=21,21", "up to 8 different ports"),
        ("ftp=65536", "up to 8 different ports"),
        ("ftp=1,2,3,4,5,6,7,8,9", "up to 8 different ports"),
    ] {
        let found = errors(&format!("[dataplane]\nhelper = \"{helper}\"\n"));
        assert!(found.contains(wanted), "{helper}: no {wanted:?} in {found}");
    }
}

#[test]
fn automatic_xdp_is_accepted_without_fast_path() {
    let dataplane = load("[dataplane]\nxdp = \"auto\"\nfast_path = \"off\"\n").dataplane;
    let arguments = dataplane.arguments().collect::<Vec<_>>().join(" ");
    assert_eq!(arguments, "--fast-path off --xdp auto");
}

#[test]
fn invalid_or_contradictory_dataplane_setting_is_refused_with_its_position() {
    for [line, place, title, help] in cases(
        r#"
            backend = "af_xdp" | test.toml:2:11 | unknown word `af_xdp` | one of: auto, af_packet, tun
            xdp = "eth0" ; fast_path = "off" | test.toml:2:7 | xdp is a part of the kernel fast path, which is off | leave out fast_path, or xdp
            fast_path = "on" ; backend = "tun" | test.toml:3:11 | the kernel fast path excludes the backend `tun` | leave out backend, or write fast_path = "off"
            reverse_path = "loose" ; fast_path = "on" | test.toml:2:16 | the kernel fast path excludes checks of the reverse path | leave out reverse_path, or write fast_path = "off"
            fast_path = "on" ; reverse_path = "strict" | test.toml:3:16 | the kernel fast path excludes checks of the reverse path | leave out reverse_path, or write fast_path = "off"
            workers = 65 | test.toml:2:11 | number of workers 65 is out of range | write workers = 1
            when_full = "grow" | test.toml:2:13 | unknown word `grow` | one of: drop, evict
        "#,
    ) {
        let message = errors(&format!("[dataplane]\n{line}\n"));
        for part in [place, title, help] {
            assert!(message.contains(part), "{line}: no {part:?} in {message}");
        }
    }
    // If the kernel fast path is not required, the dataplane starts without it.
    for fast_path in ["off", "auto"] {
        load(&format!(
            "[dataplane]\nfast_path = \"{fast_path}\"\nbackend = \"tun\"\nreverse_path = \"loose\"\n"
        ));
    }
    load("[dataplane]\nfast_path = \"on\"\nbackend = \"af_packet\"\nreverse_path = \"off\"\n");
}

#[test]
fn sync_ipvs_table_sets_daemons_and_invalid_values_are_refused() {
    use lvs_core::sync::SyncRole;
    assert_eq!(
        load("").sync,
        None,
        "a file without [sync.ipvs] changes the daemons"
    );
    let daemons = load("[sync.ipvs]\ninterface = \"eth2\"\nsyncid = 5\n").sync;
    let daemons = daemons.expect("daemons are configured");
    let roles: Vec<SyncRole> = daemons.iter().map(|daemon| daemon.role).collect();
    assert_eq!(roles, [SyncRole::Master, SyncRole::Backup]);
    assert!(daemons.iter().all(|daemon| daemon.syncid == 5));
    let one = load("[sync.ipvs]\ninterface = \"eth2\"\nrole = \"backup\"\n").sync;
    assert_eq!(one.map(|daemons| daemons.len()), Some(1));
    for [text, title] in cases(
        r#"
            role = "both" | [sync.ipvs] has no interface
            interface = "10.0.0.1/24" | is not the name of an interface
            interface = "eth2" ; group = "10.0.0.1" | is not a multicast group
            interface = "eth2" ; syncid = 256 | syncid 256 is out of range
            interface = "eth2" ; port = 0 | port 0 is out of range
            interface = "eth2" ; role = "boss" | boss
        "#,
    ) {
        let message = errors(&format!("[sync.ipvs]\n{text}\n"));
        assert!(message.contains(title), "no {title:?} in {message}");
    }
}

#[test]
fn sync_peers_table_is_converted_to_options_of_dataplane_or_refused_if_invalid() {
    let config = load(
        "[sync.peers]\naddresses = [\"192.0.2.2\", \"[2001:db8::3]:9\"]\nkey_file = \"/key\"\nlisten = \"192.0.2.1\"\nconnect_timeout = \"1m\"\nmismatch_alarm_after = \"2m\"\n",
    );
    assert_eq!(
        config.sync, None,
        "[sync.peers] sets synchronisation daemons"
    );
    assert_eq!(
        config.dataplane.arguments().collect::<Vec<_>>().join(" "),
        "--sync-peer 192.0.2.2 --sync-peer [2001:db8::3]:9 --sync-key /key --sync-listen 192.0.2.1 --sync-wait 60 --sync-alarm 120"
    );
    let both = load(
        "[sync.ipvs]\ninterface = \"eth2\"\n[sync.peers]\naddresses = \"192.0.2.2\"\nkey_file = \"/key\"\n",
    );
    assert_eq!(both.sync.map(|daemons| daemons.len()), Some(2));
    assert!(both.dataplane.peers.is_some());
    let workers = |count: &str| {
        format!(
            "[dataplane]\nworkers = {count}\n[sync.peers]\naddresses = \"192.0.2.2\"\nkey_file = \"/key\"\n"
        )
    };
    for count in ["1", "2", "\"auto\""] {
        assert!(load(&workers(count)).dataplane.peers.is_some());
    }
    let key = "key_file = \"/key\"\n";
    for [text, title] in cases(
        r#"
            addresses = "192.0.2.2" | [sync.peers] has no key_file
            KEY ; addresses = "other" | `other` is not an address
            KEY ; addresses = [] | 0 peers are configured
            KEY ; addresses = ["192.0.2.2", "192.0.2.2:9"] | 192.0.2.2 is named twice
            KEY ; addresses = "192.0.2.2" ; listen = "eth0" | `eth0` is not a usable address
            KEY ; addresses = "192.0.2.2" ; connect_timeout = "2h" | `connect_timeout` is out of range
            KEY ; addresses = "192.0.2.2" ; mismatch_alarm_after = "0s" | `mismatch_alarm_after` is out of range
            KEY | `addresses` of [sync.peers] is missing
        "#,
    ) {
        let text = text.replace("KEY", key);
        let message = errors(&format!("[sync.peers]\n{text}"));
        assert!(message.contains(title), "no {title:?} in {message}");
    }
}

#[test]
fn sysctl_with_invalid_value_is_refused_with_position_and_fix() {
    let message = errors("[sysctl]\nest_nice = 20\n");
    assert!(
        message.contains("help: use a whole number from -20 to 19"),
        "no `help: use a whole number from -20 to 19` in {message}"
    );
    for [line, place, title] in cases(
        r#"
            drop_entry = 4 | 2:14 | `4` is not a value of drop_entry
            drop_entry = -1 | 2:14 | `-1` is not a value of drop_entry
            sync_version = 2 | 2:16 | `2` is not a value of sync_version
            sync_ports = 3 | 2:14 | `3` is not a value of sync_ports
            est_nice = 20 | 2:12 | `20` is not a value of est_nice
            lblc_expiration = -1 | 2:19 | `-1` is not a value of lblc_expiration
            sync_threshold = "50 3" | 2:18 | `50 3` is not a value of sync_threshold
            sync_threshold = 3 | 2:18 | `3` is not a value of sync_threshold
            conn_reuse_mode = "on" | 2:19 | `on` is not a value of conn_reuse_mode
            conn_reuse_mode = "" | 2:19 | `` is not a value of conn_reuse_mode
            est_cpulist = "3-1" | 2:15 | `3-1` is not a value of est_cpulist
        "#,
    ) {
        let message = errors(&format!("[sysctl]\n{line}\n"));
        for part in [title, &format!("test.toml:{place}\n"), "help: "] {
            assert!(message.contains(part), "{line}: no {part:?} in\n{message}");
        }
    }
    let text =
        "[sysctl]\nest_cpulist = \"\"\nsync_threshold = \"3 50\"\nsync_ports = 4\nest_nice = -20\n";
    assert_eq!(load(text).sysctls.len(), 4);
}

#[test]
fn every_scheduler_is_accepted_and_documented_and_every_sysctl_is_accepted() {
    const DOCUMENTATION: &str = include_str!("../../../../../docs/configuration.md");
    for name in lvs_core::Registry::new().names() {
        let text = tunnelled(&format!("forward = \"nat\"\nscheduler = \"{name}\""), "");
        assert_eq!(load(&text).services[0].config.scheduler, name);
        assert!(
            DOCUMENTATION.contains(&format!("`\"{name}\"`")),
            "{name} is not documented"
        );
    }
    let defaults = lvs_core::settings::Sysctls::default();
    for name in lvs_core::settings::Sysctls::NAMES {
        let value = defaults
            .get(name)
            .expect("the key has a value")
            .replace('\t', " ");
        load(&format!("[sysctl]\n{name} = \"{value}\"\n"));
    }
}

#[test]
fn filter_keys_accept_networks_and_files_and_refuse_invalid_or_contradictory_values() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("blocked");
    std::fs::write(&path, "203.0.113.0/24 # bad\n2001:db8:bad::/48\n").unwrap();
    let path = path.display();
    let text = |filter: &str| {
        format!(
            "[[service]]\naddress = \"192.0.2.10:80\"\nforward = \"nat\"\nfilter = {filter}\n[[service.server]]\naddress = \"10.0.0.1\"\n"
        )
    };
    let config = load(&text(&format!(
        "{{ allow = \"10.0.0.0/8\", deny = [\"10.1.0.0/16\"], deny_file = \"{path}\" }}"
    )));
    let lists = config.services[0].filter.lists();
    assert_eq!(lists.allow, ["10.0.0.0/8".parse().unwrap()]);
    assert_eq!(lists.deny.len(), 3);
    assert_eq!(config.filter, None);
    for [filter, reason] in cases(
        r#"
            { deny = "10.0.0.0/33" } | expected an address
            { deny = "::1", allow = "::1" } | both allowed and denied
            { deny_file = "/nonexistent" } | cannot read /nonexistent
        "#,
    ) {
        let error = errors(&text(filter));
        assert!(error.contains(reason), "{filter}: no {reason:?} in {error}");
    }
}

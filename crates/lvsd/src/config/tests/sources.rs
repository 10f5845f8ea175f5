//! The keys of `discover`, `[dns]`, `[cluster]` and `[kubernetes]`.

use std::os::unix::fs::PermissionsExt;

use super::*;

const FILE: &str = "[[service]]\nname = \"web\"\naddress = \"192.0.2.1:80\"\nforward = \"nat\"\n\
     discover = { dns = \"_http._TCP.example.org.\" }\n\
     [[service.server]]\naddress = \"10.0.0.1:80\"\nweight = 7\n\
     [[service]]\nname = \"other\"\naddress = \"192.0.2.2:80\"\nforward = \"nat\"\n\
     [[service.server]]\naddress = \"10.0.0.9:80\"\n";

#[test]
fn invalid_discover_or_dns_table_is_refused_and_name_servers_get_port_53() {
    for (servers, words) in [
        ("{}", "names no source"),
        ("{ dns = \"a b\" }", "is not a name"),
        (
            "{ dns = \"_a._tcp.b\", port = 80 }",
            "SRV records contain the port",
        ),
        ("{ dns = \"a.b\", port = 0 }", "port 0 is out of range"),
        ("{ dsn = \"a.b\" }", "did you mean `dns`?"),
        ("\"a.b\"", "expected a table"),
    ] {
        let text = FILE.replace("{ dns = \"_http._TCP.example.org.\" }", servers);
        let report = Config::from_toml("test.toml", &text).expect_err(servers);
        assert!(
            report.to_string().contains(words),
            "{servers}: no {words:?} in {report}"
        );
    }
    for (dns, words) in [
        ("name_servers = \"ns.example.org\"", "is not an address"),
        ("name_servers = []", "0 name servers are configured"),
        ("min_ttl = \"0s\"", "`min_ttl` is out of range"),
        (
            "min_ttl = \"1h\"\nmax_ttl = \"1m\"",
            "`max_ttl` is below `min_ttl`",
        ),
        ("timeout = \"1ms\"", "`timeout` is out of range"),
    ] {
        let report =
            Config::from_toml("test.toml", &format!("{FILE}[dns]\n{dns}\n")).expect_err(dns);
        assert!(
            report.to_string().contains(words),
            "{dns}: no {words:?} in {report}"
        );
    }
    let text = format!(
        "{FILE}[dns]\nname_servers = [\"192.0.2.53\", \"[2001:db8::1]:5353\"]\nmin_ttl = \"1s\"\n"
    );
    let (config, _) = Config::from_toml("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
    let all: Vec<String> = config
        .lookups
        .name_servers
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(all, ["192.0.2.53:53", "[2001:db8::1]:5353"]);
}

#[test]
fn dns_and_etcd_examples_are_valid_and_in_the_documentation() {
    for (example, page, services) in [
        (
            include_str!("../../../../../examples/dns.toml"),
            include_str!("../../../../../docs/discovery.md"),
            2,
        ),
        (
            include_str!("../../../../../examples/etcd.toml"),
            include_str!("../../../../../docs/etcd.md"),
            1,
        ),
    ] {
        let (config, report) =
            Config::from_toml("example.toml", example).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(config.services.len(), services);
        assert_eq!(report.findings.len(), 0, "{report}");
        let (_, text) = example
            .split_once('\n')
            .expect("the example begins with a comment");
        assert!(page.contains(text), "the page does not contain {example}");
    }
}

#[test]
fn configuration_with_more_than_1024_dns_names_is_refused() {
    let service = |n: usize| {
        format!(
            "[[service]]\naddress = \"192.0.2.1:{}\"\nforward = \"nat\"\ndiscover = {{ dns = \"n{n}.example.org\" }}\n",
            n + 1
        )
    };
    let text = |names: usize| (0..names).map(service).collect::<String>();
    assert!(Config::from_toml("test.toml", &text(1024)).is_ok());
    let report =
        Config::from_toml("test.toml", &text(1025)).expect_err("too many names are accepted");
    assert!(
        report.to_string().contains("1025 names"),
        "no `1025 names` in {report}"
    );
}

#[test]
fn invalid_cluster_table_is_refused_and_insecure_cluster_table_causes_warning() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let empty = empty.display().to_string();
    let with = |keys: &str| format!("[cluster]\n{keys}\n{FILE}");
    for [keys, words] in cases(
        r#"
             | `etcd` is missing
            etcd = "10.0.0.5:2379" | is not a member of etcd
            etcd = "https://10.0.0.5:2379/x" | is not a member of etcd
            etcd = "https://a@10.0.0.5" | is not a member of etcd
            etcd = [] | there are 0 members
            etcd = ["http://10.0.0.5", "http://10.0.0.5:2379"] | is named twice
            etcd = "http://e" ; cert = "EMPTY" | `key` is missing
            etcd = "http://e" ; key = "EMPTY" | `cert` is missing
            etcd = "https://10.0.0.5:2379" | `ca` is missing
            etcd = "https://e" ; ca = "/nowhere" | cannot read
            etcd = "https://e" ; ca = "EMPTY" | no certificate
            etcd = "http://e" ; prefix = "lvs" | is not a prefix
            etcd = "http://e" ; director = "a/b" | is not the name of a director
            etcd = "http://e" ; lease = "1s" | `lease` is out of range
            etcd = "http://e" ; lease = "2s500ms" | whole number of seconds
            etcd = "http://e" ; timeout = "1ms" | `timeout` is out of range
            etcd = "http://e" ; agree = 2 | unknown key `agree`
            etcd = "http://e" ; user = "u" | `user` needs `password_file`
            etcd = "http://e" ; password_file = "/x" | `password_file` needs `user`
            etcd = "http://e" ; user = "u" ; password_file = "EMPTY" | contains no password
        "#,
    ) {
        let keys = keys.replace("EMPTY", &empty);
        let report = Config::from_toml("test.toml", &with(&keys)).expect_err(&keys);
        assert!(
            report.to_string().contains(words),
            "{keys}: no {words:?} in {report}"
        );
    }
    for (servers, words) in [
        ("{ etcd = \"web\" }", "the file has no [cluster]"),
        ("{ etcd = \"a b\" }", "is not the name of a pool"),
        ("{ etcd = \"a\", dns = \"b\" }", "names DNS and etcd"),
    ] {
        let text = FILE.replace("{ dns = \"_http._TCP.example.org.\" }", servers);
        let report = Config::from_toml("test.toml", &text).expect_err(servers);
        assert!(
            report.to_string().contains(words),
            "{servers}: no {words:?} in {report}"
        );
    }
    for (keys, words) in [
        ("ca = \"/etc/ssl/ca.pem\"", "this file is not used"),
        ("lease = \"2s\"", "the lease may expire during a request"),
    ] {
        let keys = format!("etcd = \"http://e\"\n{keys}");
        let (_, report) = Config::from_toml("test.toml", &with(&keys)).expect(words);
        assert!(
            report.to_string().contains(words),
            "{keys}: no {words:?} in {report}"
        );
    }
    let file = directory.path().join("password");
    std::fs::write(&file, "s3cret\n").unwrap();
    let keys = format!(
        "etcd = [\"http://10.0.0.5:2379\", \"http://[2001:db8::5]\"]\nuser = \"lvs\"\npassword_file = \"{}\"",
        file.display()
    );
    let (config, report) =
        Config::from_toml("test.toml", &with(&keys)).unwrap_or_else(|e| panic!("{e}"));
    assert!(
        report
            .to_string()
            .contains("crosses the network unencrypted"),
        "no `crosses the network unencrypted` in {report}"
    );
    for (mode, warned) in [(0o644, true), (0o601, true), (0o640, false), (0o400, false)] {
        let mode = std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(&file, mode.clone()).unwrap();
        let (_, report) = Config::from_toml("test.toml", &with(&keys)).expect("the file is valid");
        let words = "all users of this host may read the password";
        let message = report.to_string();
        assert_eq!(message.contains(words), warned, "{mode:?}: {message}");
    }
    let cluster = config.cluster.expect("the file has [cluster]");
    let members: Vec<String> = cluster
        .access
        .endpoints
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(
        members,
        ["http://10.0.0.5:2379", "http://[2001:db8::5]:2379"]
    );
    assert!(!format!("{cluster:?}").contains("s3cret"), "{cluster:?}");
}

const POOL: &str = "[[kubernetes.pool]]\nname = \"public\"\naddresses = [\"198.51.100.0/28\"]\n";

#[test]
fn invalid_kubernetes_keys_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let empty = directory.path().join("empty");
    std::fs::write(&empty, "\n").unwrap();
    let empty = empty.display().to_string();
    let server = "server = \"http://10.0.0.5:6443\"\n";
    for [keys, words] in cases(
        r#"
            POOL | `server` is missing
            SERVER | `[[kubernetes.pool]]` is missing
            server = "10.0.0.5" ; POOL | is not an API server
            server = "https://10.0.0.5/x" ; POOL | is not an API server
            server = "https://10.0.0.5" ; POOL | `ca` is missing
            server = "https://e" ; ca = "EMPTY" ; POOL | no certificate
            SERVER ; cert = "EMPTY" ; POOL | `key` is missing
            SERVER ; token_file = "/nowhere" ; POOL | cannot read
            SERVER ; namespace = "A/b" ; POOL | is not a namespace
            SERVER ; class = "" ; POOL | is not a class
            SERVER ; lease = "lvsd" ; POOL | is not a Lease
            SERVER ; director = "a b" ; POOL | is not the name of a director
            SERVER ; timeout = "1h" ; POOL | `timeout` is out of range
            SERVER ; kubeconfig = "x" ; POOL | `server` cannot be used with `kubeconfig`
            kubeconfig = "/nowhere" ; POOL | cannot read "/nowhere"
            SERVER ; context = "x" ; POOL | `context` needs `kubeconfig`
            SERVER ; kubeconfigs = "x" ; POOL | unknown key `kubeconfigs`
            SERVER ; POOL ; POOL | two pools have this name
            SERVER ; POOL ; [[kubernetes.pool]] ; name = "other" ; addresses = ["198.51.100.0/28"] | overlaps another range
            SERVER ; [[kubernetes.pool]] | `name` is missing
            SERVER ; [[kubernetes.pool]] ; name = "public" ; addresses = ["x"] | `x` is not an address
            SERVER ; [[kubernetes.pool]] ; name = "public" ; addresses = [] | 0 ranges are configured
        "#,
    ) {
        // A pod has an API server without any key.
        if words == "`server` is missing" && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            continue;
        }
        let keys = keys.replace("POOL", POOL).replace("SERVER", server);
        let text = format!("[kubernetes]\n{}", keys.replace("EMPTY", &empty));
        let report = Config::from_toml("test.toml", &text).expect_err(words);
        assert!(
            report.to_string().contains(words),
            "{keys}: no {words:?} in {report}"
        );
    }
}

#[test]
fn valid_kubernetes_keys_are_parsed_with_warnings_about_insecure_access() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("token");
    std::fs::write(&file, "s3cret\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o604)).unwrap();
    let text = format!(
        "[kubernetes]\nserver = \"http://api.example.org\"\nnamespace = \"shop\"\ntoken_file = \"{}\"\n\
         default_class = true\nlease = \"kube-system/x\"\ndirector = \"d1\"\n{POOL}",
        file.display()
    );
    let (config, report) = Config::from_toml("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
    for words in [
        "without encryption",
        "all users of this host may read the token",
    ] {
        assert!(
            report.to_string().contains(words),
            "no {words:?} in {report}"
        );
    }
    // A file without services is valid, because they come from the API server.
    assert!(
        !report.to_string().contains("nothing is balanced"),
        "unexpected `nothing is balanced` in {report}"
    );
    let settings = config.kubernetes.expect("the file has [kubernetes]");
    assert_eq!(settings.name(), "http://api.example.org:443 shop");
    assert_eq!(
        (settings.class.as_str(), settings.default_class),
        ("lvsd", true)
    );
    assert_eq!(settings.lease, ("kube-system".to_owned(), "x".to_owned()));
    assert_eq!(settings.pools.len(), 1);
}

#[test]
fn kubeconfig_provides_server_and_token_and_invalid_kubeconfig_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kubeconfig");
    let write = |server: &str, more: &str| {
        let text = format!(
            "current-context: a\ncontexts: [{{ name: a, context: {{ cluster: c, user: u }} }}]\n\
             clusters: [{{ name: c, cluster: {{ server: \"{server}\"{more} }} }}]\nusers: [{{ name: u, user: {{ token: s3cret }} }}]\n"
        );
        std::fs::write(&file, text).unwrap();
    };
    let text = format!(
        "[kubernetes]\nkubeconfig = \"{}\"\ndirector = \"d1\"\n{POOL}",
        file.display()
    );
    write("http://10.0.0.5:6443", "");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o604)).unwrap();
    let (config, report) = Config::from_toml("test.toml", &text).unwrap_or_else(|e| panic!("{e}"));
    for words in [
        "without encryption",
        "all users of this host may read the kubeconfig",
    ] {
        assert!(
            report.to_string().contains(words),
            "no {words:?} in {report}"
        );
    }
    let settings = config.kubernetes.expect("the file has [kubernetes]");
    assert_eq!(settings.name(), "http://10.0.0.5:6443");
    assert!(settings.token.is_some() && !format!("{settings:?}").contains("s3cret"));
    for [server, more, words] in cases(
        r#"
            https://10.0.0.5:6443/k8s/clusters/c |  | is not an API server
            https://10.0.0.5:6443 |  | no `certificate-authority`
            https://10.0.0.5:6443 | , certificate-authority-data: eA== | no certificate
        "#,
    ) {
        write(server, more);
        let report = Config::from_toml("test.toml", &text).expect_err(words);
        assert!(
            report.to_string().contains(words),
            "no {words:?} in {report}"
        );
        assert!(
            !report.to_string().contains("s3cret"),
            "{words}: unexpected `s3cret` in {report}"
        );
    }
}

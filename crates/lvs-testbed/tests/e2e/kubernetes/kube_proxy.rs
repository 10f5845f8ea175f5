//! Unmodified kube-proxy in ipvs mode under `lvs-run`, on a director that is a node of the cluster.
//!
//! kube-proxy uses the real `iptables` and `ipset`. The test creates kube-proxy's device
//! `kube-ipvs0` as a bridge, because not every kernel has dummy devices; kube-proxy uses an
//! existing device of that name.

use super::*;
use lvs_testbed::Topology;

/// Cluster address and port of the Service `web`.
const WEB: &str = "10.96.0.80:80";
const NODE_PORT: u16 = 8080;

/// Time limit for kube-proxy to remove a server: it waits until no connection is in TIME_WAIT (2
/// min), and checks once a minute.
const LEAVING: Duration = Duration::from_secs(240);

impl Bed {
    /// Waits until the first director's service at `address` has exactly the servers `wanted`.
    fn wait_exactly(&self, address: &str, wanted: &Servers, limit: Duration) -> Result<()> {
        let mut found = Servers::new();
        wait_until(&format!("{address} to have {wanted:?}"), limit, || {
            found = self.servers(0, address);
            found == *wanted
        })
        .with_context(|| format!("the service has {found:?}"))
    }
}

struct Cluster {
    bed: Bed,
    /// Options of `lvs-run`.
    options: &'static [&'static str],
    proxy: Option<Proc>,
}

impl Cluster {
    fn new(site: SiteOptions, dataplane: &[&str], options: &'static [&str]) -> Result<Self> {
        let mut bed = Bed::cluster(site)?;
        bed.site.serve("long", DOWNLOAD)?;
        bed.post(
            "/api/v1/nodes",
            &json!({
                "apiVersion": "v1", "kind": "Node", "metadata": { "name": "d1" },
                "status": {
                    "addresses": [{ "type": "InternalIP", "address": "192.0.2.1" }],
                    "conditions": [{ "type": "Ready", "status": "True" }],
                },
            }),
        )?;
        bed.site.director.sh("ip link add kube-ipvs0 type bridge")?;
        bed.site.start_dataplane(dataplane)?;
        let mut cluster = Self {
            bed,
            options,
            proxy: None,
        };
        cluster.start_proxy()?;
        Ok(cluster)
    }

    /// Starts kube-proxy, and waits until its `/healthz` answers. It may not have written its rules
    /// yet.
    fn start_proxy(&mut self) -> Result<()> {
        let program = std::env::var("LVS_KUBE_PROXY")
            .context("LVS_KUBE_PROXY is not set to a kube-proxy; run `make test-kubernetes`")?;
        let (kubeconfig, file) = (
            self.bed.path("proxy.kubeconfig"),
            self.bed.path("proxy.yaml"),
        );
        fs::write(
            &kubeconfig,
            format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
                 contexts:\n- name: test\n  context:\n    cluster: test\n    user: admin\n\
                 clusters:\n- name: test\n  cluster:\n    server: {}\n    insecure-skip-tls-verify: true\n\
                 users:\n- name: admin\n  user:\n    token: admin\n",
                self.bed.server()
            ),
        )?;
        // The limits of connection tracking are those of the machine, not of the node.
        fs::write(
            &file,
            format!(
                "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: ipvs\n\
                 hostnameOverride: d1\nclientConnection:\n  kubeconfig: {kubeconfig}\n\
                 healthzBindAddress: 127.0.0.1:10256\nmetricsBindAddress: 127.0.0.1:10249\n\
                 ipvs:\n  scheduler: rr\n  syncPeriod: 5s\n  minSyncPeriod: 0s\n  strictARP: true\n\
                 conntrack:\n  maxPerCore: 0\n  min: 0\n  tcpEstablishedTimeout: 0s\n  tcpCloseWaitTimeout: 0s\n"
            ),
        )?;
        let launcher = programs::find("lvs-run")?.display().to_string();
        let words = ["--", &program, "--config", &file, "--v", "3"];
        let words = [self.options, &words].concat();
        let proxy = self.bed.site.director.spawn(&launcher, &words)?;
        let healthy = wait_until("kube-proxy to be healthy", PATIENCE, || {
            let answer = "curl -sf -m 5 http://127.0.0.1:10256/healthz";
            self.bed.site.director.sh(answer).is_ok()
        });
        healthy.with_context(|| proxy.log())?;
        self.proxy = Some(proxy);
        Ok(())
    }

    fn state(&self) -> String {
        let listing = self.bed.site.lvsadm("-L -n");
        let log = self.proxy.as_ref().map(Proc::log).unwrap_or_default();
        format!("{listing:?}\n{log}")
    }

    fn wait_servers(&self, address: &str, wanted: &Servers, limit: Duration) -> Result<()> {
        let waited = self.bed.wait_exactly(address, wanted, limit);
        waited.with_context(|| self.state())
    }

    /// Checks that the dataplane uses the sysctls that kube-proxy sets.
    fn has_sysctls(&self) -> Result<()> {
        for name in ["expire_nodest_conn", "expire_quiescent_template"] {
            let value = self.bed.site.lvsadm(&format!("sysctl {name}"))?;
            ensure!(
                value.trim().ends_with('1'),
                "the sysctl is not 1: {name}: {value}"
            );
        }
        Ok(())
    }

    /// Creates a Service with a cluster address.
    fn service(&self, name: &str, address: &str, mut spec: Value) -> Result<()> {
        spec["clusterIP"] = address.into();
        spec["selector"] = json!({ "app": name });
        let metadata = json!({ "name": name });
        self.bed.post(
            SERVICES,
            &json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec }),
        )
    }

    /// Creates the Service `web` with two endpoints.
    fn web(&self) -> Result<()> {
        let port = json!({ "name": "http", "port": 80, "targetPort": 80, "nodePort": NODE_PORT });
        let web = json!({ "type": "NodePort", "ports": [port] });
        self.service("web", "10.96.0.80", web)?;
        let two = endpoints(&self.bed, &[0, 1]);
        self.bed.endpoints("web", &http(), &two)?;
        for at in [WEB, &format!("192.0.2.1:{NODE_PORT}")] {
            self.wait_servers(at, &pods(&two), PATIENCE)?;
            self.balances(at, 2)?;
        }
        Ok(())
    }

    /// Returns the client address that the servers see when `host` sends requests to `at`.
    fn source(&self, host: &Host, at: &str) -> Result<String> {
        let text = host.sh(&format!("curl -sS -f -m 60 http://{at}/addr"))?;
        println!("{} at {at} comes from {}", host.name(), text.trim());
        Ok(text.trim().to_owned())
    }

    /// Counts the servers that answer eight requests of a host, each with its own connection.
    fn answers(&self, host: &Host, at: &str) -> Result<BTreeMap<String, u64>> {
        let text = host
            .sh(&format!(
                "for i in 1 2 3 4 5 6 7 8; do curl -sS -f -m 60 http://{at}/id; done"
            ))
            .with_context(|| self.state())?;
        let mut all = BTreeMap::new();
        for name in text.lines() {
            *all.entry(name.to_owned()).or_insert(0) += 1;
        }
        println!("{} at {at}: {all:?}", host.name());
        Ok(all)
    }

    /// Checks that `servers` servers answer the client, and the director itself, equally often.
    fn balances(&self, at: &str, servers: u64) -> Result<()> {
        for host in [&self.bed.site.client, &self.bed.site.director] {
            let answers = self.answers(host, at)?;
            let equal = answers.values().all(|&count| count == 8 / servers);
            ensure!(
                equal && answers.len() as u64 == servers,
                "the servers did not answer {} equally often: {at}: {answers:?}",
                host.name()
            );
        }
        Ok(())
    }
}

/// The endpoints on these nodes, at addresses of the nodes' network.
fn endpoints(bed: &Bed, nodes: &[usize]) -> Vec<Endpoint> {
    let nodes = nodes.iter();
    nodes.map(|&node| Endpoint::on_node(bed, node)).collect()
}

#[test]
#[ignore = "by hand: needs a Kubernetes API server and kube-proxy (make test-kubernetes)"]
fn kube_proxy_in_ipvs_mode_serves_clients_and_its_own_node() -> Result<()> {
    let mut cluster = Cluster::new(SiteOptions::new("kube-proxy", Forward::Nat), &[], &[])?;
    cluster.web()?;
    let client = cluster.bed.site.client.clone();
    let seen = cluster.source(&client, WEB)?;
    ensure!(
        seen == "192.0.2.100",
        "the servers see another address of the client than 192.0.2.100: {seen}"
    );
    // kube-proxy masquerades clients on the node, whose source would otherwise be the cluster
    // address.
    let seen = cluster.source(&cluster.bed.site.director, WEB)?;
    ensure!(
        seen == "192.0.2.1",
        "the servers see another address of the node than 192.0.2.1: {seen}"
    );
    let left = endpoint_added_and_removed(&mut cluster)?;
    client_stays_with_its_server(&cluster)?;
    datagrams_leave_a_removed_endpoint(&cluster)?;
    dataplane_killed(&mut cluster, &[], 2)?;
    cluster.has_sysctls()?;
    kube_proxy_restarted(&mut cluster, &left)?;
    // This kube-proxy has added no service; it adds all at its next full synchronisation.
    dataplane_killed(&mut cluster, &[], 3)?;
    // kube-proxy sets the sysctls only when it starts.
    let mut proxy = cluster.proxy.take().context("no kube-proxy was started")?;
    proxy.stop(Signal::SIGTERM)?;
    cluster.start_proxy()?;
    cluster.has_sysctls()?;
    service_deleted(&cluster)
}

/// The servers' replies bypass the director, like those of pods on other nodes. Without full NAT,
/// only clients on the node itself receive replies, because kube-proxy masquerades their packets.
#[test]
#[ignore = "by hand: needs a Kubernetes API server and kube-proxy (make test-kubernetes)"]
fn kube_proxy_with_full_nat_serves_node_ports_with_endpoints_on_other_nodes() -> Result<()> {
    let mut site = SiteOptions::new("kube-proxy-far", Forward::Nat);
    site.topology = Topology::Routed;
    let local = ["--local-address", "192.0.2.1"];
    let mut cluster = Cluster::new(site, &local, &["--fullnat"])?;
    let router = cluster
        .bed
        .site
        .router
        .as_ref()
        .context("the site has no router")?;
    router.sh("ip route add 10.96.0.0/16 via 192.0.2.1")?;
    cluster.web()?;
    let at = format!("192.0.2.1:{NODE_PORT}");
    for host in [&cluster.bed.site.client, &cluster.bed.site.director] {
        let source = cluster.source(host, &at)?;
        ensure!(
            source == "192.0.2.1",
            "the servers see another address of {} than the local address 192.0.2.1: {source}",
            host.name()
        );
    }
    let listing = cluster.bed.site.lvsadm("-S -n")?;
    ensure!(
        listing.contains("--fullnat") && !listing.contains(" -m "),
        "no `--fullnat` or unexpected ` -m ` in {listing}"
    );
    // kube-proxy lists full NAT as NAT, and finds nothing to change.
    dataplane_killed(&mut cluster, &local, 2)
}

/// A removed endpoint keeps its download and gets no new connection. kube-proxy removes the server
/// after the download. Returns the remaining endpoints.
fn endpoint_added_and_removed(cluster: &mut Cluster) -> Result<Vec<Endpoint>> {
    let three = endpoints(&cluster.bed, &[0, 1, 2]);
    let target = WEB.parse()?;
    cluster.bed.under_load_of(target, "endpoint added", |bed| {
        bed.endpoints("web", &http(), &three)?;
        bed.wait_exactly(WEB, &pods(&three), PATIENCE)
    })?;
    let download = Downloads::start_at(&cluster.bed, WEB, "leaving", 1)?;
    let server = cluster.bed.wait_download(&pods(&three))?;
    let leaves = |pod: &Endpoint| server == format!("{}:80", pod.address);
    let left: Vec<_> = three.iter().filter(|pod| !leaves(pod)).cloned().collect();
    let mut leaving = pods(&left);
    leaving.insert(server.clone(), 0);
    let answered = cluster
        .bed
        .under_load_of(target, "endpoint removed", |bed| {
            bed.endpoints("web", &http(), &left)?;
            bed.wait_exactly(WEB, &leaving, PATIENCE)
        })?;
    println!("a server leaves: {answered:?}");
    cluster.balances(WEB, 2)?;
    download.finish()?;
    cluster.wait_servers(WEB, &pods(&left), LEAVING)?;
    Ok(left)
}

/// Checks that session affinity becomes persistence.
fn client_stays_with_its_server(cluster: &Cluster) -> Result<()> {
    const STICKY: &str = "10.96.0.81:80";
    let port = json!({ "name": "http", "port": 80, "targetPort": 80 });
    let spec = json!({
        "ports": [port], "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": { "clientIP": { "timeoutSeconds": 100 } },
    });
    cluster.service("sticky", "10.96.0.81", spec)?;
    let three = endpoints(&cluster.bed, &[0, 1, 2]);
    cluster.bed.endpoints("sticky", &http(), &three)?;
    cluster.wait_servers(STICKY, &pods(&three), PATIENCE)?;
    let listing = cluster.bed.site.lvsadm("-L -n")?;
    ensure!(
        listing.contains("10.96.0.81:80 rr persistent 100"),
        "no `10.96.0.81:80 rr persistent 100` in {listing}"
    );
    for host in [&cluster.bed.site.client, &cluster.bed.site.director] {
        let answers = cluster.answers(host, STICKY)?;
        ensure!(
            answers.len() == 1,
            "more than one server answered: {}: {answers:?}",
            host.name()
        );
    }
    Ok(())
}

/// kube-proxy removes an endpoint of a UDP service at once; the next datagram reaches another
/// endpoint.
fn datagrams_leave_a_removed_endpoint(cluster: &Cluster) -> Result<()> {
    const DNS: &str = "10.96.0.53:53";
    let bed = &cluster.bed;
    let programs = bed.site.servers[..2].iter().map(dnsmasq);
    let _programs = programs.collect::<Result<Vec<_>>>()?;
    let port = json!({ "name": "dns", "protocol": "UDP", "port": 53 });
    cluster.service("dns", "10.96.0.53", json!({ "ports": [port] }))?;
    let both = endpoints(bed, &[0, 1]);
    let servers = |pods: &[Endpoint]| -> Servers {
        let pods = pods.iter();
        pods.map(|pod| (format!("{}:53", pod.address), 1)).collect()
    };
    for pods in [&both[..], &both[1..], &both[..1]] {
        bed.endpoints("dns", &port, pods)?;
        cluster.wait_servers(DNS, &servers(pods), PATIENCE)?;
        let expected: Vec<String> = pods
            .iter()
            .map(|pod| format!("\"rs{}\"", pod.node + 1))
            .collect();
        for host in [&bed.site.client, &bed.site.director] {
            // All datagrams come from one port. The first datagram after the removal only ends the
            // old connection, and is lost.
            let text = host.sh(
                "for i in 1 2 3 4 5 6 7 8; do dig +short +tries=4 +time=10 -b 0.0.0.0#40053 @10.96.0.53 id.test txt; done | grep -v '^;' | sort -u",
            )?;
            let answers: Vec<&str> = text.lines().collect();
            println!("{} at {DNS}: {answers:?}", host.name());
            let known = |name: &&str| expected.iter().any(|one| one == name);
            ensure!(
                !answers.is_empty() && answers.iter().all(known),
                "no endpoint of the service answered, or a removed one: {answers:?} instead of {expected:?}"
            );
        }
    }
    Ok(())
}

/// Restarts kube-proxy under load. The dataplane receives the changes that happened in between.
fn kube_proxy_restarted(cluster: &mut Cluster, left: &[Endpoint]) -> Result<()> {
    let load = LoadOptions {
        concurrency: 4,
        pause_ms: 30,
        ..LoadOptions::new(WEB.parse()?)
    };
    let load = cluster.bed.site.client.steady_load(&load)?;
    load.wait_for_more(20)?;
    let mut proxy = cluster.proxy.take().context("no kube-proxy was started")?;
    proxy.stop(Signal::SIGTERM)?;
    ensure!(
        cluster.bed.servers(0, WEB) == pods(left),
        "the servers are not the remaining endpoints: {}",
        cluster.state()
    );
    let three = endpoints(&cluster.bed, &[0, 1, 2]);
    cluster.bed.endpoints("web", &http(), &three)?;
    load.wait_for_more(20)?;
    cluster.start_proxy()?;
    cluster.wait_servers(WEB, &pods(&three), PATIENCE)?;
    load.wait_for_more(20)?;
    let report = load.finish()?;
    println!(
        "kube-proxy restarted: {} answered, {} failed",
        report.ok, report.failed
    );
    ensure!(report.failed == 0, "requests failed: {report:#?}");
    Ok(())
}

/// The successor of a killed dataplane gets all services, also if the running kube-proxy was
/// restarted and has added none of them.
fn dataplane_killed(cluster: &mut Cluster, options: &[&str], servers: usize) -> Result<()> {
    let rules = |cluster: &Cluster| -> BTreeSet<String> {
        let text = cluster.bed.site.lvsadm("-S -n").unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    };
    let before = rules(cluster);
    ensure!(!before.is_empty());
    cluster
        .bed
        .site
        .dataplane
        .take()
        .context("no dataplane was started")?
        .kill();
    cluster.bed.site.start_dataplane(options)?;
    wait_until("the new dataplane to have all services", PATIENCE, || {
        rules(cluster) == before
    })
    .with_context(|| format!("{before:#?}\n{}", cluster.state()))?;
    for host in [&cluster.bed.site.client, &cluster.bed.site.director] {
        let answers = cluster.answers(host, WEB)?;
        ensure!(
            answers.len() == servers,
            "not all servers answered {}: {answers:?}",
            host.name()
        );
    }
    Ok(())
}

fn service_deleted(cluster: &Cluster) -> Result<()> {
    let bed = &cluster.bed;
    bed.ask("DELETE", &format!("{SERVICES}/web"), "", None)?;
    wait_until("the Service to be removed", PATIENCE, || {
        let listing = bed.site.lvsadm("-L -n").unwrap_or_default();
        let addresses = bed.site.director.sh("ip addr show dev kube-ipvs0");
        !listing.contains(WEB)
            && !listing.contains(&format!(":{NODE_PORT} "))
            && listing.contains("10.96.0.81:80")
            && addresses.is_ok_and(|text| !text.contains("10.96.0.80"))
    })
    .with_context(|| cluster.state())?;
    for host in [&bed.site.client, &bed.site.director] {
        host.sh(&format!("! curl -s -f -m 10 http://{WEB}/id"))?;
        host.sh(&format!(
            "! curl -s -f -m 10 http://192.0.2.1:{NODE_PORT}/id"
        ))?;
    }
    Ok(())
}

//! A Service of a real Kubernetes API server. There are no kubelets and no controllers: the test writes
//! Nodes itself, and the servers of the testbed listen at the node port.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lvs_testbed::{Forward, Proc, Site, SiteOptions, programs, wait_until};
use serde_json::{Value, json};

use crate::common::usable;

/// Limit for each step. The API server takes half a minute to start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// The server of the testbed that is the control plane.
const CONTROL: usize = 3;

/// The rights that operators apply.
const RBAC: &str = include_str!("../../../../contrib/kubernetes/rbac.yaml");

struct Cluster {
    site: Site,
}

impl Cluster {
    fn new() -> Result<Self> {
        let mut options = SiteOptions::new("kubernetes", Forward::Nat);
        options.servers = 4;
        Ok(Self {
            site: Site::new(options)?,
        })
    }

    fn path(&self, name: &str) -> String {
        self.site.testbed.dir().join(name).display().to_string()
    }

    fn server(&self) -> String {
        format!("https://{}:6443", self.site.real_address(CONTROL))
    }

    fn etcd(&self) -> Result<Proc> {
        self.site.servers[CONTROL].spawn(
            "etcd",
            &[
                "--data-dir",
                &self.path("etcd"),
                "--listen-client-urls",
                "http://127.0.0.1:12379",
                "--advertise-client-urls",
                "http://127.0.0.1:12379",
                "--listen-peer-urls",
                "http://127.0.0.1:12380",
                "--logger",
                "zap",
                "--log-level",
                "error",
            ],
        )
    }

    /// Starts the API server, which knows an administrator, and the directors by `token`.
    fn api_server(&self, token: &str) -> Result<Proc> {
        let program = std::env::var("LVS_KUBE_APISERVER")
            .context("LVS_KUBE_APISERVER names no API server: make test-kubernetes")?;
        let tokens = format!(
            "admin,admin,admin,\"system:masters\"\n{token},system:serviceaccount:lvsd:director,director\n"
        );
        fs::write(self.path("tokens.csv"), tokens)?;
        let host = &self.site.servers[CONTROL];
        let (key, address) = (
            self.path("sa.key"),
            self.site.real_address(CONTROL).to_string(),
        );
        host.sh(&format!(
            "test -s {key} || openssl genrsa -out {key} 2048 2>/dev/null"
        ))?;
        let server = host.spawn(
            program,
            &[
                "--etcd-servers=http://127.0.0.1:12379",
                "--service-cluster-ip-range=10.96.0.0/16",
                // The servers of the testbed listen at port 80.
                "--service-node-port-range=80-32767",
                &format!("--cert-dir={}", self.path("certs")),
                &format!("--service-account-key-file={key}"),
                &format!("--service-account-signing-key-file={key}"),
                "--service-account-issuer=https://kubernetes.test",
                "--authorization-mode=RBAC",
                &format!("--token-auth-file={}", self.path("tokens.csv")),
                &format!("--bind-address={address}"),
                &format!("--advertise-address={address}"),
                "--secure-port=6443",
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
            ],
        )?;
        let ready = wait_until("the API server", PATIENCE, || {
            self.ask("GET", "/readyz", "", None)
                .is_ok_and(|text| text == "ok")
        });
        ready.with_context(|| server.log())?;
        Ok(server)
    }

    /// A request of the administrator, with a body of that type.
    fn ask(&self, method: &str, path: &str, kind: &str, body: Option<&str>) -> Result<String> {
        let mut data = String::new();
        if let Some(body) = body {
            fs::write(self.path("body"), body)?;
            data = format!(
                "--data-binary @{} -H 'Content-Type: {kind}'",
                self.path("body")
            );
        }
        self.site.servers[CONTROL].sh(&format!(
            "curl -sSk --fail-with-body --max-time 20 -X {method} -H 'Authorization: Bearer admin' {data} '{}{path}'",
            self.server()
        ))
    }

    fn get(&self, path: &str) -> Value {
        let text = self.ask("GET", path, "", None).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    fn post(&self, path: &str, object: &Value) -> Result<()> {
        self.ask("POST", path, "application/json", Some(&object.to_string()))?;
        Ok(())
    }

    fn merge(&self, path: &str, change: &Value) -> Result<()> {
        let kind = "application/merge-patch+json";
        self.ask("PATCH", path, kind, Some(&change.to_string()))?;
        Ok(())
    }

    /// Creates what `rbac.yaml` has, one object after the other.
    fn permit(&self) -> Result<()> {
        for object in RBAC.split("\n---\n") {
            let kind = object.lines().find_map(|line| line.strip_prefix("kind: "));
            let path = match kind.context("a kind")? {
                "Namespace" => "/api/v1/namespaces",
                "ServiceAccount" => "/api/v1/namespaces/lvsd/serviceaccounts",
                "Secret" => "/api/v1/namespaces/lvsd/secrets",
                "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
                "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
                "Role" => "/apis/rbac.authorization.k8s.io/v1/namespaces/lvsd/roles",
                "RoleBinding" => "/apis/rbac.authorization.k8s.io/v1/namespaces/lvsd/rolebindings",
                other => anyhow::bail!("rbac.yaml has a {other}"),
            };
            self.ask("POST", path, "application/yaml", Some(object))?;
        }
        Ok(())
    }

    fn node(&self, n: usize) -> Result<()> {
        let address = self.site.real_address(n).to_string();
        self.post(
            "/api/v1/nodes",
            &json!({
                "apiVersion": "v1", "kind": "Node", "metadata": { "name": format!("n{n}") },
                "status": {
                    "addresses": [{ "type": "InternalIP", "address": address }],
                    "conditions": [{ "type": "Ready", "status": "True" }],
                },
            }),
        )
    }

    fn service(&self, name: &str, node_port: u16) -> Result<()> {
        self.post("/api/v1/namespaces/default/services", &json!({
            "apiVersion": "v1", "kind": "Service", "metadata": { "name": name },
            "spec": {
                "type": "LoadBalancer", "loadBalancerClass": "lvsd", "selector": { "app": name },
                "ports": [{ "name": "http", "port": 80, "nodePort": node_port }],
            },
        }))
    }

    fn write_file(&self) -> Result<()> {
        let (address, vip) = (self.server(), self.site.service(80).ip());
        let text = format!(
            "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n[kubernetes]\nserver = \"{address}\"\nca = \"{}\"\n\
             token_file = \"{}\"\ndirector = \"d1\"\n\n[[kubernetes.pool]]\nname = \"public\"\naddresses = \"{vip}\"\n\n\
             [defaults]\nforward = \"nat\"\nscheduler = \"rr\"\ncheck = \"none\"\n",
            self.path("certs/apiserver.crt"),
            self.path("token"),
        );
        Ok(fs::write(self.path("lvsd.toml"), text)?)
    }

    fn lvsd(&self) -> Result<Proc> {
        let (config, state) = (self.path("lvsd.toml"), self.path("state"));
        self.site.director.spawn(
            programs::find("lvsd")?,
            &["--config", &config, "--state", &state],
        )
    }

    fn status(&self) -> String {
        let (Ok(lvsd), config, state) = (
            programs::find("lvsd"),
            self.path("lvsd.toml"),
            self.path("state"),
        ) else {
            return String::new();
        };
        let command = format!(
            "{} --config {config} --state {state} status 2>&1 || true",
            lvsd.display()
        );
        self.site.director.sh(&command).unwrap_or_default()
    }

    fn wait(&self, what: &str, lvsd: &Proc, right: impl Fn() -> bool) -> Result<()> {
        wait_until(what, PATIENCE, right).with_context(|| {
            format!(
                "{}\n{:?}\n{}",
                self.status(),
                usable(&self.site),
                lvsd.log()
            )
        })
    }

    /// Whether there is an Event with these words.
    fn told(&self, words: &str) -> bool {
        let events = self.get("/api/v1/namespaces/default/events");
        events["items"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|event| {
                event["message"]
                    .as_str()
                    .is_some_and(|message| message.contains(words))
            })
    }
}

#[test]
#[ignore = "by hand: needs a Kubernetes API server (make test-kubernetes)"]
fn service_of_kubernetes_is_served_and_survives_the_loss_of_the_api_server() -> Result<()> {
    let cluster = Cluster::new()?;
    let site = &cluster.site;
    let _etcd = cluster.etcd()?;
    let mut server = cluster.api_server("first")?;
    cluster.permit()?;
    for n in 0..3 {
        cluster.node(n)?;
    }
    cluster.service("web", 80)?;
    fs::write(cluster.path("token"), "first\n")?;
    cluster.write_file()?;
    let mut lvsd = cluster.lvsd()?;

    // An address, and all nodes.
    let vip = site.service(80).ip().to_string();
    let web = "/api/v1/namespaces/default/services/web";
    cluster.wait("the address", &lvsd, || {
        cluster.get(web)["status"]["loadBalancer"]["ingress"][0]["ip"] == vip.as_str()
    })?;
    cluster.wait("all nodes", &lvsd, || usable(site) == [0, 1, 2])?;
    cluster.wait("the Event", &lvsd, || cluster.told("assigned "))?;
    cluster.wait("the status", &lvsd, || {
        let status = cluster.status();
        status.contains("1 service, ") && status.contains("d1 writes addresses")
    })?;

    // A node is cordoned, another one is excluded.
    cluster.merge(
        "/api/v1/nodes/n0",
        &json!({ "spec": { "unschedulable": true } }),
    )?;
    cluster.wait("the cordon", &lvsd, || usable(site) == [1, 2])?;
    let label = "node.kubernetes.io/exclude-from-external-load-balancers";
    cluster.merge(
        "/api/v1/nodes/n1",
        &json!({ "metadata": { "labels": { label: "" } } }),
    )?;
    cluster.wait("the label", &lvsd, || usable(site) == [2])?;
    cluster.merge(
        "/api/v1/nodes/n0",
        &json!({ "spec": { "unschedulable": null } }),
    )?;
    cluster.merge(
        "/api/v1/nodes/n1",
        &json!({ "metadata": { "labels": { label: null } } }),
    )?;
    cluster.wait("all nodes again", &lvsd, || usable(site) == [0, 1, 2])?;

    // A wrong annotation changes no service, and lvsd reports it.
    cluster.merge(
        web,
        &json!({ "metadata": { "annotations": { "lvsd/chek": "x" } } }),
    )?;
    cluster.wait("the refusal", &lvsd, || {
        cluster.told("lvsd/chek is unknown")
    })?;
    ensure!(usable(site) == [0, 1, 2] && cluster.status().contains("1 object REFUSED"));
    cluster.merge(
        web,
        &json!({ "metadata": { "annotations": { "lvsd/chek": null } } }),
    )?;
    cluster.wait("the end of the refusal", &lvsd, || {
        !cluster.status().contains("REFUSED")
    })?;

    // The pool has one address.
    cluster.service("mail", 8025)?;
    cluster.wait("the exhausted pool", &lvsd, || {
        cluster.told("has a free IPv4 address")
    })?;

    // Endpoints.
    cluster.merge(
        web,
        &json!({ "metadata": { "annotations": { "lvsd/servers": "endpoints" } } }),
    )?;
    let slices = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";
    let slice = |ready: &[usize], draining: &[usize]| {
        let endpoint = |n: &usize, ready: bool| {
            json!({
                "addresses": [site.real_address(*n).to_string()], "nodeName": format!("n{n}"),
                "conditions": { "ready": ready, "serving": true, "terminating": !ready },
            })
        };
        let ready = ready.iter().map(|n| endpoint(n, true));
        let all: Vec<Value> = ready
            .chain(draining.iter().map(|n| endpoint(n, false)))
            .collect();
        json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "name": "web-1", "labels": { "kubernetes.io/service-name": "web" } },
            "addressType": "IPv4", "endpoints": all,
            "ports": [{ "name": "http", "protocol": "TCP", "port": 80 }],
        })
    };
    cluster.post(slices, &slice(&[0, 1], &[]))?;
    cluster.wait("the endpoints", &lvsd, || usable(site) == [0, 1])?;
    cluster.merge(&format!("{slices}/web-1"), &slice(&[1, 2], &[0]))?;
    cluster.wait("the next endpoints", &lvsd, || usable(site) == [1, 2])?;

    // The API server ends, and lvsd starts without it.
    server.kill();
    cluster.wait("the trouble", &lvsd, || {
        cluster.status().contains("DOES NOT ANSWER")
    })?;
    ensure!(usable(site) == [1, 2]);
    lvsd.kill();
    lvsd = cluster.lvsd()?;
    cluster.wait("what was kept", &lvsd, || {
        cluster.status().contains("kept from before lvsd began")
    })?;
    ensure!(usable(site) == [1, 2]);

    // It is back with another token.
    let _server = cluster.api_server("second")?;
    cluster.wait("the refused token", &lvsd, || {
        cluster.status().contains("does not accept the credentials")
    })?;
    fs::write(cluster.path("token"), "second\n")?;
    cluster.wait("the new token", &lvsd, || {
        !cluster.status().contains("DOES NOT ANSWER")
    })?;
    ensure!(usable(site) == [1, 2]);

    // A Service that is deleted gives its address to the next.
    cluster.ask("DELETE", web, "", None)?;
    let mail = "/api/v1/namespaces/default/services/mail";
    cluster.wait("the address of the other Service", &lvsd, || {
        cluster.get(mail)["status"]["loadBalancer"]["ingress"][0]["ip"] == vip.as_str()
    })?;
    cluster.wait("the end of the Service", &lvsd, || {
        let status = cluster.status();
        usable(site).is_empty() && status.contains("default/mail/tcp/80")
    })
}

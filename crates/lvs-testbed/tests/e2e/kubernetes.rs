//! Services of a real Kubernetes API server, with two directors, and clients that compare all
//! bytes. There are no kubelets and no controllers: the test writes Nodes and EndpointSlices. The
//! testbed's servers are the Nodes, with the pods' addresses as additional addresses.

mod kube_proxy;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use lvs_testbed::listing::{connections, rows};
use lvs_testbed::servers::dnsmasq;
use lvs_testbed::{Forward, Host, LoadOptions, Proc, Site, SiteOptions, Vip, programs, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

/// Time limit for each step. The API server takes half a minute to start on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Number of the server that runs the API server. The servers before it are nodes.
const CONTROL: usize = 3;

/// The roles and accounts that an operator applies for the directors.
const RBAC: &str = include_str!("../../../../contrib/kubernetes/rbac.yaml");

/// The DaemonSet of directors that an operator applies.
const DIRECTORS: &str = include_str!("../../../../contrib/kubernetes/directors.yaml");

/// The Service of the tutorial.
const SERVICE: &str = include_str!("../../../../contrib/kubernetes/service.yaml");

/// Directory of a pod's ServiceAccount files.
const POD: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The `healthCheckNodePort` of the Services.
const HEALTH: u16 = 31_000;

const SERVICES: &str = "/api/v1/namespaces/default/services";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/lvsd/leases/lvsd";
const SLICES: &str = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices";

/// The API server logs only the requests of directors.
const AUDIT: &str = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules:\n\
     - level: Metadata\n  users: [\"system:serviceaccount:lvsd:director\"]\n- level: None\n";

/// API paths of the ClusterRole and the Role of `rbac.yaml`.
const RULES: [&str; 2] = [
    "/apis/rbac.authorization.k8s.io/v1/clusterroles/lvsd-director",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/lvsd/roles/lvsd-lease",
];

/// The servers of a service, with their weights.
type Servers = BTreeMap<String, u64>;

fn servers_of(listing: &str, address: &str) -> Servers {
    let rows = rows(listing);
    let mut rows = rows
        .iter()
        .skip_while(|row| row.is_server() || row.address != address);
    rows.next();
    rows.take_while(|row| row.is_server())
        .map(|row| (row.address.clone(), row.number(1).unwrap_or(u64::MAX)))
        .collect()
}

/// An RBAC right of directors.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Right {
    group: String,
    /// The resource with its subresource, such as `services/status`.
    resource: String,
    verb: String,
}

struct Bed {
    site: Site,
    etcd: Option<Proc>,
    server: Option<Proc>,
    /// `lvsd` of each director.
    directors: [Option<Proc>; 2],
}

impl Bed {
    fn new() -> Result<Self> {
        let mut options = SiteOptions::new("kubernetes", Forward::Nat);
        options.standby = true;
        options.nginx.ports.push(HEALTH);
        let mut bed = Self::cluster(options)?;
        // The host has the second address of the pool.
        bed.site.director.sh("ip addr add 192.0.2.11/32 dev eth0")?;
        bed.site.serve("long", DOWNLOAD)?;
        fs::write(bed.path("token"), "first\n")?;
        let key = bed.path("sync.key");
        bed.site
            .director
            .sh(&format!("openssl rand -hex 32 >{key}; chmod 600 {key}"))?;
        // The director that starts first holds the Lease.
        for index in [0, 1] {
            bed.write_file(index)?;
            bed.start(index)?;
            bed.wait("lvsd status to name d1 as the holder of the Lease", |bed| {
                bed.status(index).contains("d1 writes addresses")
            })?;
        }
        Ok(bed)
    }

    /// Three nodes and an API server with the objects of `rbac.yaml`.
    fn cluster(mut options: SiteOptions) -> Result<Self> {
        options.servers = CONTROL + 1;
        let site = Site::new(options)?;
        site.serve("healthz", 2)?;
        let mut bed = Self {
            site,
            etcd: None,
            server: None,
            directors: [None, None],
        };
        bed.etcd = Some(bed.start_etcd()?);
        bed.start_api_server("first")?;
        bed.permit()?;
        for n in 0..CONTROL {
            bed.node(n)?;
        }
        Ok(bed)
    }

    fn path(&self, name: &str) -> String {
        self.site.testbed.dir().join(name).display().to_string()
    }

    fn control(&self) -> &Host {
        &self.site.servers[CONTROL]
    }

    fn server(&self) -> String {
        format!("https://{}:6443", self.site.real_address(CONTROL))
    }

    fn host(&self, index: usize) -> &Host {
        match (index, &self.site.standby) {
            (1, Some(standby)) => standby,
            _ => &self.site.director,
        }
    }

    fn start_etcd(&self) -> Result<Proc> {
        self.control().spawn(
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

    /// Starts the API server, and waits until it answers. It has an account of an administrator,
    /// and an account of the directors, which authenticate with `token`.
    fn start_api_server(&mut self, token: &str) -> Result<()> {
        let program = std::env::var("LVS_KUBE_APISERVER").context(
            "LVS_KUBE_APISERVER is not set to an API server; run `make test-kubernetes`",
        )?;
        let tokens = format!(
            "admin,admin,admin,\"system:masters\"\n{token},system:serviceaccount:lvsd:director,director\n"
        );
        fs::write(self.path("tokens.csv"), tokens)?;
        fs::write(self.path("audit.yaml"), AUDIT)?;
        let host = self.control();
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
                // The servers of the testbed listen at ports 53 and 80.
                "--service-node-port-range=53-32767",
                &format!("--cert-dir={}", self.path("certs")),
                &format!("--service-account-key-file={key}"),
                &format!("--service-account-signing-key-file={key}"),
                "--service-account-issuer=https://kubernetes.test",
                "--authorization-mode=RBAC",
                &format!("--token-auth-file={}", self.path("tokens.csv")),
                &format!("--audit-policy-file={}", self.path("audit.yaml")),
                &format!("--audit-log-path={}", self.path("audit.log")),
                &format!("--bind-address={address}"),
                &format!("--advertise-address={address}"),
                "--secure-port=6443",
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
                // kubeadm starts the API server with the same option.
                "--allow-privileged=true",
                // The API server ends watches before it exits, as in a cluster.
                "--shutdown-watch-termination-grace-period=20s",
            ],
        )?;
        let ready = wait_until("the API server to answer", PATIENCE, || {
            self.ask("GET", "/readyz", "", None)
                .is_ok_and(|text| text == "ok")
        });
        ready.with_context(|| server.log())?;
        self.server = Some(server);
        Ok(())
    }

    fn ask(&self, method: &str, path: &str, kind: &str, body: Option<&str>) -> Result<String> {
        self.ask_as("admin", method, path, (kind, body))
    }

    fn ask_as(
        &self,
        token: &str,
        method: &str,
        path: &str,
        (kind, body): (&str, Option<&str>),
    ) -> Result<String> {
        let mut data = String::new();
        if let Some(body) = body {
            fs::write(self.path("body"), body)?;
            data = format!(
                "--data-binary @{} -H 'Content-Type: {kind}'",
                self.path("body")
            );
        }
        self.control().sh(&format!(
            "curl -sSk --fail-with-body --max-time 20 -X {method} -H 'Authorization: Bearer {token}' {data} '{}{path}'",
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

    /// Creates the objects of `rbac.yaml` one by one. Also checks that the API server accepts the
    /// other manifests without unknown fields.
    fn permit(&self) -> Result<()> {
        self.apply(RBAC, "")?;
        self.apply(DIRECTORS, "&dryRun=All")
    }

    fn apply(&self, manifest: &str, options: &str) -> Result<()> {
        for object in manifest.split("\n---\n") {
            let kind = object.lines().find_map(|line| line.strip_prefix("kind: "));
            let path = match kind.context("the manifest has no kind")? {
                "Namespace" => "/api/v1/namespaces",
                "ServiceAccount" => "/api/v1/namespaces/lvsd/serviceaccounts",
                "Secret" => "/api/v1/namespaces/lvsd/secrets",
                "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles",
                "ClusterRoleBinding" => "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
                "Role" => "/apis/rbac.authorization.k8s.io/v1/namespaces/lvsd/roles",
                "RoleBinding" => "/apis/rbac.authorization.k8s.io/v1/namespaces/lvsd/rolebindings",
                "ConfigMap" => "/api/v1/namespaces/lvsd/configmaps",
                "DaemonSet" => "/apis/apps/v1/namespaces/lvsd/daemonsets",
                other => anyhow::bail!("a manifest has the unexpected kind {other}"),
            };
            let path = format!("{path}?fieldValidation=Strict{options}");
            self.ask("POST", &path, "application/yaml", Some(object))?;
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

    /// Creates a Service with one port.
    fn service(&self, name: &str, port: &Value, policy: &str) -> Result<()> {
        let mut spec = json!({
            "type": "LoadBalancer", "loadBalancerClass": "lvsd", "selector": { "app": name },
            "ports": [port], "externalTrafficPolicy": policy,
        });
        if policy == "Local" {
            spec["healthCheckNodePort"] = HEALTH.into();
        }
        let metadata = json!({ "name": name });
        let service =
            json!({ "apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec });
        self.post(SERVICES, &service)
    }

    /// Creates or replaces the EndpointSlice of a Service: addresses, nodes and states.
    fn endpoints(&self, name: &str, port: &Value, endpoints: &[Endpoint]) -> Result<()> {
        let slice = json!({
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice",
            "metadata": { "name": format!("{name}-1"), "labels": { "kubernetes.io/service-name": name } },
            "addressType": "IPv4", "ports": [port],
            "endpoints": endpoints.iter().map(Endpoint::json).collect::<Vec<_>>(),
        });
        let path = format!("{SLICES}/{name}-1");
        match self.get(&path)["metadata"]["name"].is_string() {
            true => self.merge(&path, &slice),
            false => self.post(SLICES, &slice),
        }
    }

    fn annotate(&self, name: &str, annotation: &str, value: &Value) -> Result<()> {
        let change = json!({ "metadata": { "annotations": { annotation: value } } });
        self.merge(&format!("{SERVICES}/{name}"), &change)
    }

    fn address(&self, name: &str) -> String {
        let service = self.get(&format!("{SERVICES}/{name}"));
        let address = &service["status"]["loadBalancer"]["ingress"][0]["ip"];
        address.as_str().unwrap_or_default().to_owned()
    }

    fn wait_address(&self, name: &str, wanted: &str) -> Result<()> {
        wait_until(&format!("{name} to have {wanted}"), PATIENCE, || {
            self.address(name) == wanted
        })
    }

    fn wait_event(&self, name: &str, words: &str) -> Result<()> {
        wait_until(
            &format!("the Event `{words}` to be written"),
            PATIENCE,
            || self.output(name, words),
        )
    }

    /// Whether a director has renewed its Lease.
    fn lease_is_renewed(&self) -> bool {
        let spec = &self.get(LEASE)["spec"];
        spec["renewTime"].is_string() && spec["renewTime"] != spec["acquireTime"]
    }

    /// Whether an Event about the Service `name` contains `words`.
    fn output(&self, name: &str, words: &str) -> bool {
        let events = self.get("/api/v1/namespaces/default/events");
        let mut events = events["items"].as_array().into_iter().flatten();
        events.any(|event| {
            let message = event["message"].as_str().unwrap_or_default();
            event["involvedObject"]["name"] == name && message.contains(words)
        })
    }

    /// Writes the director's configuration file: the first director reads API server and
    /// credentials from it, the second from a kubeconfig.
    fn write_file(&self, index: usize) -> Result<()> {
        let (server, ca, token) = (
            self.server(),
            self.path("certs/apiserver.crt"),
            self.path("token"),
        );
        let mut access = format!("server = \"{server}\"\nca = \"{ca}\"\ntoken_file = \"{token}\"");
        if index == 1 {
            let kubeconfig = self.path("kubeconfig");
            let text = format!(
                "apiVersion: v1\nkind: Config\ncurrent-context: test\n\
                 contexts:\n- name: test\n  context:\n    cluster: test\n    user: director\n\
                 clusters:\n- name: test\n  cluster:\n    server: {server}\n    certificate-authority: {ca}\n\
                 users:\n- name: director\n  user:\n    tokenFile: {token}\n"
            );
            fs::write(&kubeconfig, text)?;
            access = format!("kubeconfig = \"{kubeconfig}\"");
        }
        let text = format!(
            "[dataplane]\ninterface = [\"eth0\", \"eth1\"]\n\n[sync.peers]\naddresses = [\"192.0.2.{}\"]\nkey_file = \"{}\"\n\
             connect_timeout = \"1s\"\n\n[kubernetes]\n{access}\ndirector = \"d{}\"\n\
             timeout = \"30s\"\n\n[[kubernetes.pool]]\nname = \"public\"\naddresses = \"192.0.2.10-192.0.2.11\"\n\n\
             [defaults]\nforward = \"nat\"\nscheduler = \"rr\"\ncheck = \"none\"\nvip = \"host\"\n",
            2 - index,
            self.path("sync.key"),
            index + 1,
        );
        Ok(fs::write(self.path(&format!("d{index}.toml")), text)?)
    }

    fn lvsd(&self, index: usize) -> Vec<String> {
        let config = self.path(&format!("d{index}.toml"));
        let state = self.path(&format!("d{index}.state"));
        ["--config".to_owned(), config, "--state".to_owned(), state].into()
    }

    fn start(&mut self, index: usize) -> Result<()> {
        let program = programs::find("lvsd")?;
        let lvsd = self.host(index).spawn(program, &self.lvsd(index))?;
        self.directors[index] = Some(lvsd);
        Ok(())
    }

    fn director(&mut self, index: usize) -> Result<&mut Proc> {
        self.directors[index]
            .as_mut()
            .context("the process was not started")
    }

    /// Returns the output of `lvsd status`, also if the command fails because no `lvsd` answers.
    fn status_as(&self, index: usize, options: &str) -> String {
        let Ok(program) = programs::find("lvsd") else {
            return String::new();
        };
        let words = self.lvsd(index).join(" ");
        let command = format!("{} {words} status {options} || true", program.display());
        self.host(index).sh(&command).unwrap_or_default()
    }

    fn status(&self, index: usize) -> String {
        self.status_as(index, "2>&1")
    }

    fn wait(&self, what: &str, right: impl Fn(&Self) -> bool) -> Result<()> {
        wait_until(what, PATIENCE, || right(self)).with_context(|| {
            let log = |index: usize| self.directors[index].as_ref().map(Proc::log);
            let listing = |index| self.site.lvsadm_on(self.host(index), "-L -n");
            let of = |index| {
                format!(
                    "{}\n{:?}\n{:?}",
                    self.status(index),
                    listing(index),
                    log(index)
                )
            };
            format!("{}\n{}", of(0), of(1))
        })
    }

    /// The servers of a service at a director.
    fn servers(&self, index: usize, address: &str) -> Servers {
        let listing = self
            .site
            .lvsadm_on(self.host(index), "-L -n")
            .unwrap_or_default();
        servers_of(&listing, address)
    }

    /// Whether a service has exactly these servers. Removed servers that still have connections do
    /// not count.
    fn has(&self, index: usize, address: &str, wanted: &Servers) -> bool {
        Self::are(&self.servers(index, address), wanted)
    }

    fn are(servers: &Servers, wanted: &Servers) -> bool {
        let leaves =
            |(server, weight): (&String, &u64)| *weight == 0 || wanted.contains_key(server);
        wanted
            .iter()
            .all(|(server, weight)| servers.get(server) == Some(weight))
            && servers.iter().all(leaves)
    }

    /// Waits until both directors have these servers.
    fn wait_servers(&self, address: &str, wanted: &Servers) -> Result<()> {
        self.wait(&format!("{address} to have {wanted:?}"), |bed| {
            [0, 1].iter().all(|&index| bed.has(index, address, wanted))
        })
    }

    /// The states of connections with a server in the first director's table.
    fn states(&self, server: &str) -> Result<Vec<String>> {
        let listed = connections(&self.site.lvsadm("-L -n -c")?)?.into_iter();
        let listed = listed.filter(|one| one.destination == server);
        Ok(listed.map(|one| one.state).collect())
    }

    /// Waits until the only download begins; returns its server, which is one of `servers`.
    fn wait_download(&self, servers: &Servers) -> Result<String> {
        let mut found = None;
        wait_until("the download to begin", PATIENCE, || {
            let established = |server: &&String| {
                let states = self.states(server).unwrap_or_default();
                states.iter().any(|state| state == "ESTABLISHED")
            };
            found = servers.keys().find(established).cloned();
            found.is_some()
        })?;
        found.context("no server was found")
    }

    /// Nodes 0 to 2 at a port, with their weights.
    fn nodes(&self, port: u16, weights: [u64; CONTROL]) -> Servers {
        let nodes = (0..).zip(weights);
        nodes
            .map(|(n, weight)| (format!("{}:{port}", self.site.real_address(n)), weight))
            .collect()
    }

    fn web(&self) -> String {
        self.site.service(80).to_string()
    }

    /// The rights of `rbac.yaml`, each with the API path of its role.
    fn permitted(&self) -> Vec<(&'static str, Right)> {
        let mut all = Vec::new();
        for path in RULES {
            let role = self.get(path);
            for rule in role["rules"].as_array().into_iter().flatten() {
                for resource in words(&rule["resources"]) {
                    for verb in words(&rule["verbs"]) {
                        let group = rule["apiGroups"][0].as_str().unwrap_or_default();
                        let (group, resource) = (group.to_owned(), resource.clone());
                        all.push((
                            path,
                            Right {
                                group,
                                resource,
                                verb,
                            },
                        ));
                    }
                }
            }
        }
        all
    }

    /// Revokes all rights of directors except `rights`.
    fn permit_only(&self, rights: &[&(&str, Right)]) -> Result<()> {
        for path in RULES {
            let of_role = rights.iter().filter(|(role, _)| *role == path);
            let rules: Vec<Value> = of_role
                .map(|(_, right)| {
                    json!({
                        "apiGroups": [right.group], "resources": [right.resource],
                        "verbs": [right.verb],
                    })
                })
                .collect();
            self.merge(path, &json!({ "rules": rules }))?;
        }
        Ok(())
    }

    /// Whether the API server grants directors this right. Changed rules take effect a little
    /// later.
    fn allows(&self, (role, right): &(&str, Right)) -> bool {
        let (resource, part) = right
            .resource
            .split_once('/')
            .unwrap_or((&right.resource, ""));
        let namespace = if *role == RULES[1] { "lvsd" } else { "" };
        let asked = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "spec": {
                "user": "system:serviceaccount:lvsd:director",
                "resourceAttributes": {
                    "group": right.group, "resource": resource, "subresource": part,
                    "verb": right.verb, "namespace": namespace,
                },
            },
        });
        let path = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
        let answer = self.ask("POST", path, "application/json", Some(&asked.to_string()));
        let answer = answer.and_then(|answer| Ok(serde_json::from_str::<Value>(&answer)?));
        answer.is_ok_and(|answer| answer["status"]["allowed"] == true)
    }

    /// Checks that the requests of directors in the audit log need exactly the rights of
    /// `rbac.yaml`.
    fn rights_are_those_that_are_used(&self) -> Result<()> {
        let mut used = BTreeSet::new();
        let log = fs::read_to_string(self.path("audit.log"))?;
        // A killed API server leaves an incomplete log line.
        let lines = log
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok());
        for line in lines {
            let line: Value = line;
            let by = line["userAgent"].as_str().unwrap_or_default();
            if !by.starts_with("lvsd/") {
                continue;
            }
            let object = &line["objectRef"];
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let resource = match object["subresource"].as_str() {
                Some(part) => format!("{}/{part}", text(&object["resource"])),
                None => text(&object["resource"]),
            };
            used.insert(Right {
                group: text(&object["apiGroup"]),
                resource,
                verb: text(&line["verb"]),
            });
        }
        let permitted = self.permitted().into_iter();
        let permitted: BTreeSet<Right> = permitted.map(|(_, right)| right).collect();
        ensure!(
            used == permitted,
            "the directors do not use exactly the permitted rights: used {used:#?}, permitted {permitted:#?}"
        );
        println!(
            "rights: {} permitted, and exactly these are used",
            used.len()
        );
        Ok(())
    }

    /// Starts the container of the DaemonSet as a kubelet does: its arguments and mounts, a token
    /// of its account, the host's network, and only the programs of the image.
    fn start_pod(&self) -> Result<Pod> {
        let set = self.get("/apis/apps/v1/namespaces/lvsd/daemonsets/director");
        let spec = &set["spec"]["template"]["spec"];
        let container = &spec["containers"][0];
        ensure!(
            spec["hostNetwork"] == true
                && spec["automountServiceAccountToken"] == true
                && container["securityContext"]["privileged"] == true
                && container["securityContext"]["readOnlyRootFilesystem"] == true,
            "the manifest lacks the host network, the token, or a security setting: {spec:#}"
        );
        let account = spec["serviceAccountName"].as_str().unwrap_or_default();
        let token = self.ask(
            "POST",
            &format!("/api/v1/namespaces/lvsd/serviceaccounts/{account}/token"),
            "application/json",
            Some("{\"spec\":{\"expirationSeconds\":3600}}"),
        )?;
        let token: Value = serde_json::from_str(&token)?;
        let file = |name: &str| self.path(&format!("pod/{name}"));
        for directory in ["root", "file", "state", "run", "account"] {
            fs::create_dir_all(file(directory))?;
        }
        let token = token["status"]["token"]
            .as_str()
            .context("the API server returned no token")?;
        fs::write(file("account/token"), token)?;
        fs::copy(self.path("certs/apiserver.crt"), file("account/ca.crt"))?;
        let map = self.get("/api/v1/namespaces/lvsd/configmaps/director");
        for (name, text) in map["data"]
            .as_object()
            .context("the ConfigMap contains no files")?
        {
            fs::write(
                file(&format!("file/{name}")),
                text.as_str().unwrap_or_default(),
            )?;
        }
        let root = file("root");
        let mut script = format!(
            "set -e\nmount -t tmpfs -o mode=755 pod {root}\ncd {root}\nmkdir -p usr/bin proc sys dev\n\
             for i in lib lib64; do [ ! -d /usr/$i ] || {{ mkdir usr/$i; ln -s usr/$i $i; mount --rbind /usr/$i usr/$i; }}; done\n\
             for i in proc sys dev; do mount --rbind /$i $i; done\n"
        );
        for name in ["lvsd", "lvsadm", "lvs-dataplane"] {
            let program = programs::find(name)?;
            script += &format!(
                "touch usr/bin/{name}; mount --bind {} usr/bin/{name}\n",
                program.display()
            );
        }
        let mut mount = |name: &str, at: &str, read_only: bool| {
            script += &format!("mkdir -p .{at}; mount --bind {} .{at}\n", file(name));
            if read_only {
                script += &format!("mount -o remount,bind,ro .{at}\n");
            }
        };
        mount("account", POD, true);
        for one in container["volumeMounts"]
            .as_array()
            .context("the container has no mounts")?
        {
            let name = one["name"].as_str().context("the mount has no name")?;
            let at = one["mountPath"].as_str().context("the mount has no path")?;
            mount(name, at, one["readOnly"] == true);
        }
        let node = &container["env"][0];
        ensure!(
            node["name"] == "NODE_NAME"
                && node["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
        );
        let arguments = words(&container["args"]).join(" ");
        let arguments = arguments.replace("$(NODE_NAME)", "n4");
        script += &format!(
            "mount -o remount,ro {root}\nexec env -i PATH=/usr/sbin:/usr/bin KUBERNETES_SERVICE_HOST={} KUBERNETES_SERVICE_PORT=6443 chroot {root} /usr/bin/lvsd {arguments}\n",
            self.site.real_address(CONTROL)
        );
        let options = [
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
        ];
        let command: Vec<&str> = options.into_iter().chain([script.as_str()]).collect();
        let run = self.site.director.spawn("unshare", &command)?;
        let children = format!("/proc/{0}/task/{0}/children", run.pid());
        let mut first = String::new();
        wait_until("the first process of the pod to run", PATIENCE, || {
            first = fs::read_to_string(&children)
                .unwrap_or_default()
                .trim()
                .to_owned();
            !first.is_empty()
        })
        .with_context(|| run.log())?;
        Ok(Pod {
            run,
            host: self.site.director.clone(),
            first,
            probe: words(&container["readinessProbe"]["exec"]["command"]),
        })
    }

    /// Runs `act` while clients make requests to the service `web`, none of which may fail. Returns
    /// the number of answers of each server.
    fn under_load(
        &mut self,
        what: &str,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<BTreeMap<String, u64>> {
        self.under_load_of(self.site.service(80), what, act)
    }

    /// [`under_load`](Self::under_load) with requests to `target`.
    fn under_load_of(
        &mut self,
        target: SocketAddr,
        what: &str,
        act: impl FnOnce(&mut Self) -> Result<()>,
    ) -> Result<BTreeMap<String, u64>> {
        let load = LoadOptions {
            concurrency: 4,
            sizes: vec![1, 1448, 20_011, 300_007],
            pause_ms: 30,
            ..LoadOptions::new(target)
        };
        let load = self.site.client.steady_load(&load)?;
        load.wait_for_more(20)?;
        act(self).context(what.to_owned())?;
        load.wait_for_more(20)?;
        let report = load.finish()?;
        println!(
            "{what}: {} requests in {:.1} s, {} failed, {} bytes",
            report.ok + report.failed,
            report.seconds,
            report.failed,
            report.bytes
        );
        ensure!(report.failed == 0, "requests failed: {what}: {report:#?}");
        Ok(report.servers)
    }
}

fn words(array: &Value) -> Vec<String> {
    let words = array.as_array().into_iter().flatten();
    words
        .filter_map(|word| word.as_str().map(str::to_owned))
        .collect()
}

/// A pod of the DaemonSet.
struct Pod {
    run: Proc,
    host: Host,
    /// Process id of the first process of the container.
    first: String,
    /// Command of the readiness probe.
    probe: Vec<String>,
}

impl Pod {
    /// Runs a program of the image in the pod.
    fn exec(&self, command: &str) -> Result<String> {
        self.host.sh(&format!(
            "nsenter --target {} --mount --pid --root --wd=/ {command} 2>&1",
            self.first
        ))
    }

    fn status(&self) -> String {
        let answer = self.exec("/usr/bin/lvsd status");
        answer.unwrap_or_else(|error| format!("{error:#}"))
    }

    fn wait(&self, what: &str, right: impl Fn(&str) -> bool) -> Result<()> {
        let waited = wait_until(what, PATIENCE, || right(&self.status()));
        waited.with_context(|| format!("{}\n{}", self.status(), self.run.log()))
    }

    /// Waits until the readiness probe succeeds.
    fn ready(&self) -> Result<()> {
        let probe = self.probe.join(" ");
        let ready = wait_until("the pod to be ready", PATIENCE, || {
            self.exec(&probe).is_ok()
        });
        ready.with_context(|| self.run.log())
    }

    fn wait_servers(&self, address: &str, wanted: &Servers) -> Result<()> {
        let listing = || self.exec("/usr/bin/lvsadm -L -n").unwrap_or_default();
        let waited = wait_until(&format!("{address} to have {wanted:?}"), PATIENCE, || {
            Bed::are(&servers_of(&listing(), address), wanted)
        });
        waited.with_context(|| format!("{}\n{}\n{}", listing(), self.status(), self.run.log()))
    }

    /// Stops the pod with the signal that its image configures.
    fn end(mut self) -> Result<()> {
        kill(Pid::from_raw(self.first.parse()?), Signal::SIGINT)?;
        self.run.wait(PATIENCE).map(drop)
    }
}

/// A pod behind a Service.
#[derive(Clone, Debug)]
struct Endpoint {
    address: String,
    node: usize,
    ready: bool,
}

impl Endpoint {
    fn json(&self) -> Value {
        json!({
            "addresses": [self.address], "nodeName": format!("n{}", self.node),
            "conditions": { "ready": self.ready, "serving": true, "terminating": !self.ready },
        })
    }

    /// An endpoint that uses the address of its node.
    fn on_node(bed: &Bed, node: usize) -> Self {
        Self {
            address: bed.site.real_address(node).to_string(),
            node,
            ready: true,
        }
    }

    /// Starts a pod as an additional address of its node.
    fn start(bed: &Bed, number: usize) -> Result<Self> {
        let pod = Self {
            address: format!("10.0.0.{}", 100 + number),
            node: number % CONTROL,
            ready: true,
        };
        let host = &bed.site.servers[pod.node];
        host.sh(&format!("ip addr add {}/24 dev eth0", pod.address))?;
        // The kernel's neighbour table is shared by all namespaces, and other tests may fill it.
        // Permanent entries are not limited.
        let mac = host.sh("ip -br link show eth0 | awk '{ print $3 }'")?;
        for index in [0, 1] {
            bed.host(index).sh(&format!(
                "ip neigh replace {} lladdr {} dev eth1 nud permanent",
                pod.address,
                mac.trim()
            ))?;
        }
        Ok(pod)
    }

    /// Waits until the last connection of the pod has ended.
    fn end(&self, bed: &Bed) -> Result<()> {
        let server = format!("{}:80", self.address);
        bed.wait("the last connection of a pod to close", |bed| {
            let has_ended = |state: &String| state == "TIME_WAIT" || state == "CLOSE";
            let states = bed.states(&server);
            states.is_ok_and(|states| states.iter().all(has_ended))
        })?;
        let host = &bed.site.servers[self.node];
        host.sh(&format!("ip addr del {}/24 dev eth0", self.address))
            .map(drop)
    }
}

/// The servers that a director should list for these endpoints.
fn pods(endpoints: &[Endpoint]) -> Servers {
    let pods = endpoints.iter();
    pods.map(|pod| (format!("{}:80", pod.address), u64::from(pod.ready)))
        .collect()
}

/// Size of a download in bytes.
const DOWNLOAD: u64 = 32 << 20;

/// Downloads that are slow until the test lets them finish. The client compares all bytes.
struct Downloads {
    clients: Proc,
    hurry: String,
}

impl Downloads {
    fn start(bed: &Bed, name: &str, count: usize) -> Result<Self> {
        Self::start_at(bed, &bed.site.vip.to_string(), name, count)
    }

    /// Like [`start`](Self::start), from the service at `address` instead of the VIP.
    fn start_at(bed: &Bed, address: &str, name: &str, count: usize) -> Result<Self> {
        let (script, hurry) = (
            bed.path(&format!("{name}.sh")),
            bed.path(&format!("{name}.hurry")),
        );
        let text = format!(
            "set -o pipefail\ncurl -sS -f -m 1500 http://{address}/long | \
             perl -e 'while (sysread STDIN, $_, 65536) {{ print; -e $ARGV[0] or select undef, undef, undef, 0.5 }}' {hurry} | \
             cmp - {}\n",
            bed.path("www/long")
        );
        fs::write(&script, text)?;
        let all = format!("seq {count} | xargs -P {count} -I NUMBER bash {script}");
        let clients = bed.site.client.spawn("bash", &["-c", &all])?;
        Ok(Self { clients, hurry })
    }

    /// Downloads the remaining bytes at full speed, and checks that the downloads succeed.
    fn finish(mut self) -> Result<()> {
        ensure!(
            self.clients.is_running(),
            "the clients have exited: {}",
            self.clients.log()
        );
        fs::write(&self.hurry, "")?;
        let status = self.clients.wait(PATIENCE)?;
        ensure!(
            status.success(),
            "a download failed: {status}: {}",
            self.clients.log()
        );
        Ok(())
    }
}

#[test]
#[ignore = "by hand: needs a Kubernetes API server (make test-kubernetes)"]
fn services_of_kubernetes_keep_their_clients_through_all_events() -> Result<()> {
    let mut bed = Bed::new()?;
    addresses_and_refusals(&mut bed)?;
    cordon_keeps_a_download(&mut bed)?;
    let pods = rolling_update(&mut bed)?;
    let pods = drain_of_a_node(&mut bed, pods)?;
    api_server_killed(&mut bed)?;
    let pods = history_compacted(&mut bed, pods)?;
    token_replaced(&mut bed)?;
    datagrams_to_local_endpoints(&mut bed)?;
    class_taken_away_and_service_deleted(&mut bed, &pods)?;
    director_lost(&mut bed)?;
    bed.rights_are_those_that_are_used()
}

/// One Service uses full NAT to nodes, and one a tunnel to pods. The director runs like the
/// container of the DaemonSet, and needs each right of its account.
#[test]
#[ignore = "by hand: needs a Kubernetes API server (make test-kubernetes)"]
fn director_of_the_daemon_set_serves_with_the_rights_of_its_account() -> Result<()> {
    const WEB: &str = "203.0.113.9:80";
    let mut options = SiteOptions::new("daemon-set", Forward::Tun);
    options.vip = Vip::Routed;
    let mut bed = Bed::cluster(options)?;
    let router = bed.site.router.as_ref().context("the site has no router")?;
    router.sh("ip route add 203.0.113.9/32 via 192.0.2.1")?;
    let own = DIRECTORS.replace("198.51.100.0/28", "203.0.113.9-203.0.113.10");
    let own = own.replace("[\"10.0.0.4\"]", "[\"192.0.2.1\"]");
    ensure!(own.contains("203.0.113.9") && own.contains("192.0.2.1"));
    bed.apply(&own, "")?;
    let pod = bed.start_pod()?;
    pod.ready()?;
    let port = json!({ "name": "http", "port": 80, "nodePort": 80 });
    bed.service("web", &port, "Cluster")?;
    bed.wait_address("web", "203.0.113.9")?;
    pod.wait_servers(WEB, &bed.nodes(80, [1, 1, 1]))?;
    bed.under_load_of(WEB.parse()?, "nodes by full NAT", |_| Ok(()))?;

    let port = json!({ "name": "http", "port": 80, "nodePort": 8080 });
    bed.service("pods", &port, "Cluster")?;
    bed.annotate("pods", "lvsd/forward", &"tun".into())?;
    bed.annotate("pods", "lvsd/servers", &"endpoints".into())?;
    bed.wait_address("pods", "203.0.113.10")?;
    let mut all: Vec<Endpoint> = (0..2).map(|node| Endpoint::on_node(&bed, node)).collect();
    bed.endpoints("pods", &http(), &all)?;
    pod.wait_servers(&bed.web(), &pods(&all))?;
    let answered = bed.under_load("pods by tunnel", |bed| {
        all.push(Endpoint::on_node(bed, 2));
        all[0].ready = false;
        bed.endpoints("pods", &http(), &all)?;
        pod.wait_servers(&bed.web(), &pods(&all))
    })?;
    ensure!(
        answered.len() == CONTROL,
        "not all nodes answered: {answered:?}"
    );
    bed.annotate("web", "lvsd/chek", &"x".into())?;
    bed.wait_event("web", "lvsd/chek is unknown")?;
    // A refused Service does not make the pod unready.
    pod.ready()?;
    wait_until("the Lease to be renewed", PATIENCE, || {
        bed.lease_is_renewed()
    })?;
    bed.rights_are_those_that_are_used()?;
    pod.end()?;
    each_right_is_needed(&bed)
}

/// Starts a director without one of its rights, for each right in turn. Each time, the API server
/// refuses a request.
fn each_right_is_needed(bed: &Bed) -> Result<()> {
    let rights = bed.permitted();
    for taken in &rights {
        let Right { resource, verb, .. } = &taken.1;
        let others: Vec<_> = rights.iter().filter(|right| *right != taken).collect();
        bed.permit_only(&others)?;
        wait_until(
            "the revoked right of the directors to end",
            PATIENCE,
            || !bed.allows(taken),
        )?;
        // With these objects missing, the director has to create and renew a Lease, write a status,
        // and write an Event.
        let _ = bed.ask("DELETE", LEASE, "", None);
        let status = json!({ "status": { "loadBalancer": { "ingress": null } } });
        bed.merge(&format!("{SERVICES}/web/status"), &status)?;
        let pod = bed.start_pod()?;
        pod.wait(
            &format!("the directors to be refused the right to {verb} {resource}"),
            |status| status.contains(&format!("cannot {verb} resource \"{resource}\"")),
        )?;
        pod.end()?;
        println!("without {verb} of {resource}: refused");
    }
    bed.permit_only(&rights.iter().collect::<Vec<_>>())?;
    let pod = bed.start_pod()?;
    bed.wait_address("web", "203.0.113.9")?;
    pod.wait("the directors to have all rights", |status| {
        !status.contains("403")
    })
}

/// Assigns addresses until the pool is exhausted. Checks that the API server refuses other requests
/// of directors, and that an invalid annotation changes nothing.
fn addresses_and_refusals(bed: &mut Bed) -> Result<()> {
    let path = format!("{SERVICES}?dryRun=All");
    bed.ask("POST", &path, "application/yaml", Some(SERVICE))?;
    let port = json!({ "name": "http", "port": 80, "nodePort": 80 });
    bed.service("web", &port, "Cluster")?;
    bed.wait("the Service to have an address", |bed| {
        bed.address("web") == "192.0.2.10"
    })?;
    bed.wait_servers(&bed.web(), &bed.nodes(80, [1, 1, 1]))?;
    let service = bed.get(&format!("{SERVICES}/web"));
    let ingress = &service["status"]["loadBalancer"]["ingress"][0];
    ensure!(
        ingress["ports"] == json!([{ "port": 80, "protocol": "TCP" }])
            && ingress["ipMode"] == "VIP"
    );
    for (method, path) in [
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/nodes/n0"),
        ("DELETE", SERVICES),
    ] {
        let refused = bed.ask_as("first", method, path, ("", None));
        ensure!(
            refused.is_err_and(|why| format!("{why:#}").contains("403")),
            "the request was not refused with 403: {method} {path}"
        );
    }
    bed.wait("the Event to be written", |bed| {
        bed.output("web", "assigned 192.0.2.10")
    })?;
    let port = json!({ "name": "dns", "protocol": "UDP", "port": 53, "nodePort": 53 });
    bed.service("dns", &port, "Local")?;
    bed.wait("the second Service to have an address", |bed| {
        bed.address("dns") == "192.0.2.11"
    })?;
    let port = json!({ "name": "smtp", "port": 25, "nodePort": 8025 });
    bed.service("mail", &port, "Cluster")?;
    bed.wait(
        "the director to report that the pool has no free address",
        |bed| {
            bed.output("mail", "has a free IPv4 address")
                && bed.status(0).contains("1 object REFUSED")
        },
    )?;
    bed.under_load("wrong annotation", |bed| {
        bed.annotate("web", "lvsd/chek", &"x".into())?;
        bed.wait("an Event to report the annotation", |bed| {
            bed.output("web", "lvsd/chek is unknown")
        })?;
        bed.wait("both directors to refuse the Service", |bed| {
            [0, 1]
                .iter()
                .all(|&index| bed.status(index).contains("2 objects REFUSED"))
        })?;
        ensure!(bed.servers(0, &bed.web()) == bed.nodes(80, [1, 1, 1]));
        bed.annotate("web", "lvsd/chek", &Value::Null)?;
        bed.wait("both directors to accept the Service again", |bed| {
            [0, 1]
                .iter()
                .all(|&index| bed.status(index).contains("1 object REFUSED"))
        })
    })
    .map(drop)
}

/// A cordoned node keeps its connections, and gets no new ones; an excluded node is not a server.
fn cordon_keeps_a_download(bed: &mut Bed) -> Result<()> {
    let download = Downloads::start(bed, "cordon", 1)?;
    let server = bed.wait_download(&bed.nodes(80, [1, 1, 1]))?;
    let mut nodes = (0..CONTROL).map(|n| format!("{}:80", bed.site.real_address(n)));
    let node = nodes
        .position(|one| one == server)
        .context("no node has this server")?;
    let path = format!("/api/v1/nodes/n{node}");
    let mut weights = [1; CONTROL];
    weights[node] = 0;
    bed.under_load("node cordoned", |bed| {
        bed.merge(&path, &json!({ "spec": { "unschedulable": true } }))?;
        bed.wait_servers(&bed.web(), &bed.nodes(80, weights))
    })?;
    let answered = bed.under_load("node is cordoned", |_| Ok(()))?;
    let name = format!("rs{}", node + 1);
    ensure!(
        !answered.contains_key(&name),
        "the cordoned node got new connections: {answered:?}"
    );
    download.finish()?;
    let label = "node.kubernetes.io/exclude-from-external-load-balancers";
    let exclude = |value: Value| json!({ "metadata": { "labels": { label: value } } });
    bed.under_load("node excluded", |bed| {
        bed.merge(&path, &exclude("".into()))?;
        bed.merge(&path, &json!({ "spec": { "unschedulable": null } }))?;
        let mut others = bed.nodes(80, weights);
        others.remove(&server);
        bed.wait_servers(&bed.web(), &others)?;
        bed.merge(&path, &exclude(Value::Null))?;
        bed.wait_servers(&bed.web(), &bed.nodes(80, [1, 1, 1]))
    })
    .map(drop)
}

fn http() -> Value {
    json!({ "name": "http", "protocol": "TCP", "port": 80 })
}

/// Replaces ten pods, one after the other. Returns the new ones.
fn rolling_update(bed: &mut Bed) -> Result<Vec<Endpoint>> {
    let mut all = (0..10)
        .map(|n| Endpoint::start(bed, n))
        .collect::<Result<Vec<_>>>()?;
    bed.endpoints("web", &http(), &all)?;
    bed.under_load("the endpoints to replace the nodes as servers", |bed| {
        bed.annotate("web", "lvsd/servers", &"endpoints".into())?;
        bed.wait_servers(&bed.web(), &pods(&all))
    })?;
    bed.under_load("rolling update of 10 endpoints", |bed| {
        for n in 0..10 {
            all.push(Endpoint::start(bed, 10 + n)?);
            all[0].ready = false;
            bed.endpoints("web", &http(), &all)?;
            bed.wait_servers(&bed.web(), &pods(&all))?;
            all.remove(0).end(bed)?;
            bed.endpoints("web", &http(), &all)?;
        }
        bed.wait_servers(&bed.web(), &pods(&all))
    })?;
    Ok(all)
}

/// Terminates all pods of a node, while a download from one of them continues. Returns the
/// remaining pods.
fn drain_of_a_node(bed: &mut Bed, mut all: Vec<Endpoint>) -> Result<Vec<Endpoint>> {
    let download = Downloads::start(bed, "drain", 1)?;
    let server = bed.wait_download(&pods(&all))?;
    let mut from = all.iter();
    let from = from.find(|pod| server == format!("{}:80", pod.address));
    let node = from.context("no pod has the server of the download")?.node;
    for pod in all.iter_mut().filter(|pod| pod.node == node) {
        pod.ready = false;
    }
    let path = format!("/api/v1/nodes/n{node}");
    bed.under_load("node drained", |bed| {
        bed.merge(&path, &json!({ "spec": { "unschedulable": true } }))?;
        bed.endpoints("web", &http(), &all)?;
        bed.wait_servers(&bed.web(), &pods(&all))
    })?;
    let answered = bed.under_load("node is drained", |_| Ok(()))?;
    let name = format!("rs{}", node + 1);
    ensure!(
        !answered.contains_key(&name),
        "the drained node got new connections: {answered:?}"
    );
    download.finish()?;
    let (left, gone): (Vec<_>, Vec<_>) = all.into_iter().partition(|pod| pod.ready);
    bed.under_load("the pods of the drained node to terminate", |bed| {
        for pod in &gone {
            pod.end(bed)?;
        }
        bed.endpoints("web", &http(), &left)?;
        bed.wait_servers(&bed.web(), &pods(&left))?;
        bed.merge(&path, &json!({ "spec": { "unschedulable": null } }))
    })?;
    Ok(left)
}

const LOST: &str = "NO USABLE ANSWER";

/// Directors continue to serve without an API server, and also start without it.
fn api_server_killed(bed: &mut Bed) -> Result<()> {
    bed.under_load("API server killed and started again", |bed| {
        let before = [0, 1].map(|index| bed.servers(index, &bed.web()));
        bed.server
            .take()
            .context("the process was not started")?
            .kill();
        bed.wait("both directors to report the lost API server", |bed| {
            [0, 1].iter().all(|&index| bed.status(index).contains(LOST))
        })?;
        bed.director(0)?.stop(Signal::SIGTERM)?;
        bed.start(0)?;
        bed.wait("the stored servers to be used", |bed| {
            bed.status(0).contains("from before the start of lvsd")
        })?;
        ensure!(before == [0, 1].map(|index| bed.servers(index, &bed.web())));
        bed.start_api_server("first")?;
        bed.wait("the API server to be back", |bed| {
            [0, 1]
                .iter()
                .all(|&index| !bed.status(index).contains(LOST))
        })?;
        ensure!(before == [0, 1].map(|index| bed.servers(index, &bed.web())));
        Ok(())
    })
    .map(drop)
}

/// The API server discards the history of changes that a director has missed. Returns the pods.
///
/// The step is repeated if the director's connection was reset: the director then lists all objects,
/// and does not need the history.
fn history_compacted(bed: &mut Bed, mut all: Vec<Endpoint>) -> Result<Vec<Endpoint>> {
    const ROUNDS: usize = 10;
    let refused = |bed: &Bed| {
        let log = bed.directors[1].as_ref().map(Proc::log);
        log.is_some_and(|log| log.contains("all objects are read again"))
    };
    for round in 0..ROUNDS {
        bed.under_load("etcd compacted", |bed| {
            compact_while_director_is_stopped(bed, &mut all, 20 + 2 * round)
        })?;
        if refused(bed) {
            return Ok(all);
        }
    }
    bail!("no watch was refused in {ROUNDS} rounds");
}

/// Stops the second director, compacts the history of etcd, and adds the pods `first` and `first +
/// 1`: the second one while that director is stopped.
fn compact_while_director_is_stopped(
    bed: &mut Bed,
    all: &mut Vec<Endpoint>,
    first: usize,
) -> Result<()> {
    let etcdctl = |bed: &Bed, words: &str| {
        bed.control().sh(&format!(
            "ETCDCTL_API=3 etcdctl --endpoints=http://127.0.0.1:12379 --command-timeout=60s {words}"
        ))
    };
    // A change that arrives shows that the director has opened all watches.
    all.push(Endpoint::start(bed, first)?);
    bed.endpoints("web", &http(), all)?;
    bed.wait_servers(&bed.web(), &pods(all))?;
    bed.director(1)?.signal(Signal::SIGSTOP)?;
    // SIGTERM ends watches cleanly, so that lvsd continues them and lists nothing again.
    bed.server
        .take()
        .context("the process was not started")?
        .stop(Signal::SIGTERM)?;
    etcdctl(bed, "put /lvs-test x")?;
    let status: Value = serde_json::from_str(&etcdctl(bed, "endpoint status -w json")?)?;
    let revision = &status[0]["Status"]["header"]["revision"];
    etcdctl(bed, &format!("compact {revision}"))?;
    bed.start_api_server("first")?;
    all.push(Endpoint::start(bed, first + 1)?);
    bed.endpoints("web", &http(), all)?;
    bed.director(1)?.signal(Signal::SIGCONT)?;
    bed.wait_servers(&bed.web(), &pods(all))
}

/// The API server refuses the old token, so that the directors must read the new one.
fn token_replaced(bed: &mut Bed) -> Result<()> {
    bed.under_load("token replaced", |bed| {
        bed.server
            .take()
            .context("the process was not started")?
            .kill();
        bed.start_api_server("second")?;
        bed.wait("the API server to refuse the old token", |bed| {
            [0, 1].iter().all(|&index| {
                bed.status(index)
                    .contains("does not accept the credentials")
            })
        })?;
        fs::write(bed.path("token"), "second\n")?;
        bed.wait("the API server to accept the new token", |bed| {
            [0, 1]
                .iter()
                .all(|&index| !bed.status(index).contains(LOST))
        })
    })
    .map(drop)
}

/// Packets of a UDP service are sent only to the nodes whose `healthCheckNodePort` reports local
/// endpoints.
fn datagrams_to_local_endpoints(bed: &mut Bed) -> Result<()> {
    const ADDRESS: &str = "192.0.2.11:53";
    let programs = bed.site.servers[..CONTROL].iter().map(dnsmasq);
    let _programs = programs.collect::<Result<Vec<_>>>()?;
    let port = json!({ "name": "dns", "protocol": "UDP", "port": 5353 });
    let pod = |number: usize, node| Endpoint {
        address: format!("10.244.0.{number}"),
        node,
        ready: true,
    };
    let mut all = [pod(1, 0), pod(2, 0), pod(3, 1)];
    let server = |node| format!("{}:53", bed.site.real_address(node));
    let (first, second) = (server(0), server(1));
    let servers = |weights: [u64; 2]| -> Servers {
        [first.clone(), second.clone()]
            .into_iter()
            .zip(weights)
            .collect()
    };
    // A datagram may be lost, so that dig asks again.
    let answers = |wanted: &[&str]| -> Result<()> {
        let answer = bed.site.client.sh(
            "for i in 1 2 3 4 5 6 7 8; do dig +short +tries=4 +time=10 @192.0.2.11 id.test txt; done | grep -v '^;' | sort -u",
        )?;
        let answer: Vec<&str> = answer.lines().collect();
        ensure!(
            answer == wanted,
            "datagrams reached other servers: {answer:?}\n{}\n{}\n{}",
            bed.status(0),
            bed.site.lvsadm("-L -n --stats")?,
            bed.site.lvsadm("drops --all")?
        );
        println!("datagrams: 8 answers of {wanted:?}");
        Ok(())
    };
    bed.endpoints("dns", &port, &all)?;
    bed.wait_servers(ADDRESS, &servers([2, 1]))?;
    answers(&["\"rs1\"", "\"rs2\""])?;
    let node = &bed.site.servers[1];
    node.sh(&format!(
        "nft add table inet health\n\
         nft 'add chain inet health input {{ type filter hook input priority 0; }}'\n\
         nft add rule inet health input tcp dport {HEALTH} reject with tcp reset"
    ))?;
    bed.wait_servers(ADDRESS, &[(first.clone(), 2)].into())?;
    answers(&["\"rs1\""])?;
    node.sh("nft delete table inet health")?;
    bed.wait_servers(ADDRESS, &servers([2, 1]))?;
    all[2].ready = false;
    bed.endpoints("dns", &port, &all)?;
    bed.wait_servers(ADDRESS, &servers([2, 0]))?;
    answers(&["\"rs1\""])
}

/// The address of a Service that is deleted, or no longer a load balancer, is assigned to a waiting
/// Service.
fn class_taken_away_and_service_deleted(bed: &mut Bed, all: &[Endpoint]) -> Result<()> {
    let web = format!("{SERVICES}/web");
    bed.merge(&web, &json!({ "spec": { "type": "ClusterIP" } }))?;
    bed.wait("the waiting Service to have the released address", |bed| {
        bed.address("mail") == "192.0.2.10"
    })?;
    bed.wait(
        "the Service to be removed and its address to be assigned to the other one",
        |bed| {
            [0, 1].iter().all(|&index| {
                let status = bed.status(index);
                !status.contains("default/web/") && status.contains("default/mail/tcp/25")
            })
        },
    )?;
    let back = json!({ "spec": { "type": "LoadBalancer", "loadBalancerClass": "lvsd" } });
    bed.merge(&web, &back)?;
    bed.wait("an Event to report the exhausted pool", |bed| {
        bed.output("web", "has a free IPv4 address")
    })?;
    bed.ask("DELETE", &format!("{SERVICES}/mail"), "", None)?;
    bed.wait("the Service to have its address again", |bed| {
        bed.address("web") == "192.0.2.10"
    })?;
    bed.ask("DELETE", &format!("{SERVICES}/dns"), "", None)?;
    bed.wait("both Services to be removed", |bed| {
        [0, 1].iter().all(|&index| {
            let status = bed.status(index);
            !status.contains("default/mail/")
                && !status.contains("default/dns/")
                && status.contains("default/web/tcp/80")
        })
    })?;
    bed.wait_servers(&bed.web(), &pods(all))?;
    bed.under_load("load balancer class restored", |_| Ok(()))
        .map(drop)
}

/// The director with the addresses and the Lease fails; the other director continues its
/// connections.
fn director_lost(bed: &mut Bed) -> Result<()> {
    const DOWNLOADS: usize = 20;
    // The first director, which fails later, must hold the Lease.
    bed.director(1)?.stop(Signal::SIGTERM)?;
    bed.wait("the first director to hold the Lease", |bed| {
        bed.status(0).contains("d1 writes addresses")
    })?;
    bed.start(1)?;
    bed.wait(
        "the second director to report that d1 holds the Lease",
        |bed| bed.status(1).contains("d1 writes addresses"),
    )?;
    let downloads = Downloads::start(bed, "lost", DOWNLOADS)?;
    let vip = bed.web();
    let known = |bed: &Bed, index: usize| {
        let listing = bed.site.lvsadm_on(bed.host(index), "-L -n -c");
        let listed = listing
            .and_then(|text| connections(&text))
            .unwrap_or_default();
        let listed = listed.iter().filter(|one| one.virtual_address == vip);
        listed.filter(|one| one.state == "ESTABLISHED").count()
    };
    bed.wait(
        "both directors to have all connections of the downloads",
        |bed| known(bed, 0) == DOWNLOADS && known(bed, 1) == DOWNLOADS,
    )?;
    let status: Value = serde_json::from_str(&bed.status_as(0, "--json"))?;
    let dataplane = status["dataplane"]["pid"]
        .as_i64()
        .context("the status contains no dataplane pid")?;
    bed.site.unplug()?;
    bed.director(0)?.kill();
    kill(Pid::from_raw(i32::try_from(dataplane)?), Signal::SIGKILL)?;
    bed.site.fail_over()?;
    bed.wait("the other director to acquire the Lease", |bed| {
        bed.status(1).contains("d2 writes addresses")
    })?;
    let port = json!({ "name": "smtp", "port": 25, "nodePort": 8025 });
    bed.service("mail", &port, "Cluster")?;
    bed.wait("the other director to assign an address", |bed| {
        bed.address("mail") == "192.0.2.11"
    })?;
    bed.under_load(
        "the downloads to continue at the other director",
        |_| Ok(()),
    )?;
    downloads.finish()?;
    println!("director lost: {DOWNLOADS} downloads, 0 broken");
    Ok(())
}

//! Checks `[kubernetes]`: Services of type `LoadBalancer`, and the addresses that they are
//! assigned.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use toml::Spanned;

use super::Checker;
use super::cluster::TIMEOUT;
use crate::config::raw::{RawKubernetes, RawPool};
use crate::health::probe::Tls;
use crate::sources::Endpoint;
use crate::sources::kubernetes::{Access, POD, Pool, Range, Settings, Token, Wrong, is_name};
use crate::text::Diagnostic;

/// The default port of an API server.
const HTTPS: u16 = 443;
/// Maximum number of address pools.
const POOLS_MAX: usize = 64;
/// Maximum number of ranges of a pool.
const RANGES_MAX: usize = 256;
/// Maximum number of bytes of a load balancer class, as in Kubernetes.
const CLASS_MAX: usize = 316;

/// The API server, the certificates of the CA and of lvsd, and the token.
type Reached = (Endpoint, Option<Tls>, Option<Token>);

impl Checker<'_> {
    pub(super) fn kubernetes(&mut self, spanned: &Spanned<RawKubernetes>) -> Option<Settings> {
        let (span, raw) = (spanned.span(), spanned.get_ref());
        let access = self.api_access(spanned);
        let namespace = self.namespace(raw.namespace.as_ref());
        let class = self.class(raw.class.as_ref());
        let lease = self.lease(raw.lease.as_ref());
        let director = self.director(raw.director.as_ref(), &span);
        let timeout =
            self.source_time(raw.timeout.as_ref(), "timeout", &TIMEOUT, Settings::TIMEOUT);
        let pools = self.pools(spanned);
        let (server, tls, token) = access?;
        Some(Settings {
            server,
            tls,
            token,
            namespace,
            class,
            default_class: raw.default_class.unwrap_or(false),
            lease,
            director,
            timeout,
            pools,
        })
    }

    /// Reads the address of the API server and the credentials: from a kubeconfig file, from the
    /// keys of the table, or from the files of a pod. `None` after an error, which is reported.
    fn api_access(&mut self, spanned: &Spanned<RawKubernetes>) -> Option<Reached> {
        let (span, raw) = (spanned.span(), spanned.get_ref());
        let keys = [
            ("server", &raw.server),
            ("ca", &raw.ca),
            ("token_file", &raw.token_file),
            ("cert", &raw.cert),
            ("key", &raw.key),
        ];
        let mut given = keys
            .iter()
            .filter_map(|(name, key)| Some((*name, key.as_ref()?)));
        let first = given.next();
        match (&raw.kubeconfig, first) {
            (Some(file), None) => {
                let context = raw
                    .context
                    .as_ref()
                    .map(|context| context.get_ref().as_str());
                let access = Access::by_kubeconfig(file.get_ref(), context);
                if access.is_ok() {
                    self.readable_by_others(file, "the kubeconfig");
                }
                return self.reached(&file.span(), access);
            }
            (Some(_), Some((name, key))) => {
                let title = format!("`{name}` cannot be used with `kubeconfig`");
                self.report(
                    Diagnostic::error(key.span(), title).help(
                        "leave this key out: the kubeconfig contains the API server and the credentials",
                    ),
                );
                return None;
            }
            (None, _) => {}
        }
        if let Some(context) = &raw.context {
            self.report(
                Diagnostic::error(context.span(), "`context` needs `kubeconfig`")
                    .help("add kubeconfig = \"/etc/lvsd/kubeconfig\""),
            );
        }
        let variable = |name| std::env::var(name).ok();
        let (host, port) = (
            variable("KUBERNETES_SERVICE_HOST"),
            variable("KUBERNETES_SERVICE_PORT"),
        );
        if first.is_none()
            && let Some(access) = Access::in_pod(host, port, POD)
        {
            return self.reached(&span, access);
        }
        self.by_keys(spanned)
    }

    fn reached(
        &mut self,
        span: &std::ops::Range<usize>,
        access: Result<Access, Wrong>,
    ) -> Option<Reached> {
        let access = match access {
            Ok(access) => access,
            Err((what, help)) => {
                self.report(Diagnostic::error(span.clone(), what).help(help));
                return None;
            }
        };
        let Some(server) = Endpoint::parse(&access.server, HTTPS) else {
            let title = format!("{:?} is not an API server", access.server);
            let help = "lvsd needs https://, an address or name, and a port, without a path";
            self.report(Diagnostic::error(span.clone(), title).help(help));
            return None;
        };
        if !server.secure {
            if access.token.is_some() {
                self.token_in_the_clear(span);
            }
            return Some((server, None, access.token));
        }
        let Some(ca) = access.ca else {
            self.report(
                Diagnostic::error(
                    span.clone(),
                    "the kubeconfig has no `certificate-authority`",
                )
                .help("write the kubeconfig again: kubectl config view --raw --flatten --minify"),
            );
            return None;
        };
        match Tls::authenticated(ca, access.cert, access.key) {
            Ok(tls) => Some((server, Some(tls), access.token)),
            Err((_, why, help)) => {
                self.report(Diagnostic::error(span.clone(), why).help(help));
                None
            }
        }
    }

    fn token_in_the_clear(&mut self, span: &std::ops::Range<usize>) {
        self.report(
            Diagnostic::warning(span.clone(), "the token is sent without encryption")
                .help("write https:// for the API server"),
        );
    }

    fn by_keys(&mut self, spanned: &Spanned<RawKubernetes>) -> Option<Reached> {
        let (span, raw) = (spanned.span(), spanned.get_ref());
        let server = self.api_server(spanned);
        let files = (raw.ca.as_ref(), raw.cert.as_ref(), raw.key.as_ref());
        self.certificate_with_key(files);
        let secure = server.as_ref().is_some_and(|server| server.secure);
        let tls = secure.then(|| {
            self.source_tls(
                &span,
                files,
                "name the file with the certificate of the cluster's CA, which is `certificate-authority-data` of a kubeconfig, or /etc/kubernetes/pki/ca.crt",
            )
        });
        if let Some(file) = &raw.token_file {
            self.readable_by_others(file, "the token");
        }
        if server.is_some() && !secure && raw.token_file.is_some() {
            self.token_in_the_clear(&span);
        }
        let token = raw.token_file.as_ref();
        let token = token.map(|file| Token::File(PathBuf::from(file.get_ref())));
        Some((server?, tls.flatten(), token))
    }

    /// Reports a secret that cannot be read, or that other users can read.
    fn readable_by_others(&mut self, file: &Spanned<String>, what: &str) {
        let finding = match std::fs::metadata(file.get_ref()) {
            Err(error) => {
                let title = format!("cannot read {:?}: {error}", file.get_ref());
                Diagnostic::error(file.span(), title)
                    .help("write the path of a file that lvsd can read")
            }
            Ok(meta) if meta.mode() & 0o007 != 0 => {
                let help = format!(
                    "remove the rights of other users: chmod o= {}",
                    file.get_ref()
                );
                let title = format!("all users of this host may read {what}");
                Diagnostic::warning(file.span(), title).help(help)
            }
            Ok(_) => return,
        };
        self.report(finding);
    }

    fn api_server(&mut self, spanned: &Spanned<RawKubernetes>) -> Option<Endpoint> {
        let Some(written) = &spanned.get_ref().server else {
            self.missing(
                &spanned.span(),
                "`server`",
                "add server = \"https://10.0.0.5:6443\", the API server, or a balanced address of several; or kubeconfig = \"/etc/lvsd/kubeconfig\"; in a pod, lvsd uses KUBERNETES_SERVICE_HOST",
            );
            return None;
        };
        let server = Endpoint::parse(written.get_ref(), HTTPS);
        if server.is_none() {
            let title = format!("{:?} is not an API server", written.get_ref());
            self.report(Diagnostic::error(written.span(), title).help(
                "write https://, its address or name, and its port: \"https://10.0.0.5:6443\"",
            ));
        }
        server
    }

    fn namespace(&mut self, written: Option<&Spanned<String>>) -> Option<String> {
        let written = written?;
        if !is_name(written.get_ref()) {
            let title = format!("{:?} is not a namespace", written.get_ref());
            self.report(
                Diagnostic::error(written.span(), title)
                    .help("write the name of one namespace, or leave this key out for all"),
            );
        }
        Some(written.get_ref().clone())
    }

    fn class(&mut self, written: Option<&Spanned<String>>) -> String {
        let Some(written) = written else {
            return Settings::CLASS.to_owned();
        };
        let class = written.get_ref();
        let right = |b: u8| b.is_ascii_alphanumeric() || b"-._/".contains(&b);
        if !(1..=CLASS_MAX).contains(&class.len()) || !class.bytes().all(right) {
            let title = format!("{class:?} is not a class of load balancers");
            self.report(Diagnostic::error(written.span(), title).help(
                "write the value of spec.loadBalancerClass of the Services: \"example.org/external\"",
            ));
        }
        class.clone()
    }

    /// Reads the namespace and the name of the Lease.
    fn lease(&mut self, written: Option<&Spanned<String>>) -> (String, String) {
        let text = written.map_or(Settings::LEASE, |written| written.get_ref());
        let parts = text.split_once('/');
        let parts = parts.filter(|(namespace, name)| is_name(namespace) && is_name(name));
        if let (None, Some(written)) = (parts, written) {
            let title = format!("{text:?} is not a Lease");
            self.report(
                Diagnostic::error(written.span(), title)
                    .help("write namespace and name, the same on all directors: \"lvsd/lvsd\""),
            );
        }
        let (namespace, name) = parts.unwrap_or_default();
        (namespace.to_owned(), name.to_owned())
    }

    fn pools(&mut self, spanned: &Spanned<RawKubernetes>) -> Vec<Pool> {
        let raw = &spanned.get_ref().pool;
        if raw.is_empty() {
            self.missing(
                &spanned.span(),
                "`[[kubernetes.pool]]`",
                "add [[kubernetes.pool]] with name = \"public\" and addresses = [\"198.51.100.0/28\"]",
            );
        }
        if let Some(pool) = raw.get(POOLS_MAX) {
            let title = format!("there are more than {POOLS_MAX} pools");
            self.report(
                Diagnostic::error(pool.span(), title).help("a pool may have several ranges"),
            );
        }
        let mut pools: Vec<Pool> = Vec::new();
        for pool in raw.iter().take(POOLS_MAX) {
            let made = self.address_pool(pool, &pools);
            pools.push(made);
        }
        pools
    }

    fn address_pool(&mut self, spanned: &Spanned<RawPool>, others: &[Pool]) -> Pool {
        let (span, raw) = (spanned.span(), spanned.get_ref());
        let name = match &raw.name {
            Some(name) => {
                let title = match others.iter().any(|other| other.name == *name.get_ref()) {
                    true => Some("two pools have this name"),
                    false => {
                        (!is_name(name.get_ref())).then_some("this is not a valid name of a pool")
                    }
                };
                if let Some(title) = title {
                    self.report(Diagnostic::error(name.span(), title).help(
                        "write lower-case letters, digits and `-`, a different name for each pool",
                    ));
                }
                name.get_ref().clone()
            }
            None => {
                self.missing(
                    &span,
                    "`name`",
                    "add name = \"public\", which Services can request",
                );
                String::new()
            }
        };
        let mut ranges: Vec<Range> = Vec::new();
        match &raw.addresses {
            None => self.missing(
                &span,
                "`addresses`",
                "add addresses = [\"198.51.100.0/28\", \"198.51.100.32-198.51.100.40\"]",
            ),
            Some(written) => {
                let texts = &written.get_ref().0;
                if !(1..=RANGES_MAX).contains(&texts.len()) {
                    let title = format!("{} ranges are configured", texts.len());
                    let help = format!("write 1 to {RANGES_MAX} ranges");
                    self.report(Diagnostic::error(written.span(), title).help(help));
                }
                for text in texts.iter().take(RANGES_MAX) {
                    match text.parse::<Range>() {
                        Ok(range) => {
                            let known = others.iter().flat_map(|pool| &pool.ranges);
                            if known.chain(&ranges).any(|other| other.overlaps(&range)) {
                                let title = format!("{text} overlaps another range");
                                self.report(
                                    Diagnostic::error(written.span(), title)
                                        .help("assign each address to exactly one range"),
                                );
                            }
                            ranges.push(range);
                        }
                        Err(why) => self.report(Diagnostic::error(written.span(), why).help(
                            "write a network (\"198.51.100.0/28\"), the first and the last address (\"198.51.100.1-198.51.100.9\"), or one address",
                        )),
                    }
                }
            }
        }
        Pool {
            name,
            ranges,
            auto_assign: raw.auto_assign.unwrap_or(true),
        }
    }
}

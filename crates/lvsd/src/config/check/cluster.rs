//! Checks `[cluster]`: the members of etcd, the credentials and the other settings. Some of these
//! checks apply to `[kubernetes]`, too.

use std::ops::{Range, RangeInclusive};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use toml::Spanned;

use super::Checker;
use crate::config::raw::{RawCluster, RawConfig, RawDuration};
use crate::health::probe::Tls;
use crate::sources::Cluster;
use crate::sources::Endpoint;
use crate::sources::etcd::{self, Access, Password};
use crate::text::Diagnostic;
use crate::text::read_file;

/// Maximum number of configured members of etcd.
const MEMBERS_MAX: usize = 16;
/// Certificate files of a source: the CA certificates, this client's certificate, and its key.
pub(super) type Certificates<'a> = (
    Option<&'a Spanned<String>>,
    Option<&'a Spanned<String>>,
    Option<&'a Spanned<String>>,
);

pub(super) const TIMEOUT: RangeInclusive<Duration> =
    Duration::from_millis(100)..=Duration::from_secs(30);

impl Checker<'_> {
    pub(super) fn cluster(&mut self, spanned: &Spanned<RawCluster>) -> Option<Cluster> {
        let raw = spanned.get_ref();
        let access = self.access(spanned);
        let prefix = self.prefix(raw.prefix.as_ref());
        let lease = self.source_time(
            raw.lease.as_ref(),
            "lease",
            &Cluster::LEASES,
            Cluster::LEASE,
        );
        let timeout = self.source_time(raw.timeout.as_ref(), "timeout", &TIMEOUT, Cluster::TIMEOUT);
        if timeout >= lease {
            let place = raw.timeout.as_ref().or(raw.lease.as_ref());
            let span = place.map_or_else(|| spanned.span(), Spanned::span);
            self.report(
                Diagnostic::warning(
                    span,
                    "`lease` is not longer than `timeout`: the lease may expire during a request",
                )
                .help("set a `timeout` that is shorter than `lease`"),
            );
        }
        if lease.subsec_nanos() > 0
            && let Some(place) = &raw.lease
        {
            self.report(
                Diagnostic::error(place.span(), "`lease` is not a whole number of seconds")
                    .help("write \"10s\": etcd counts seconds"),
            );
        }
        let director = self.director(raw.director.as_ref(), &spanned.span());
        let mut access = access?;
        access.timeout = timeout;
        Some(Cluster {
            access,
            prefix,
            director,
            lease,
        })
    }

    /// Returns the name of this director: the name in the file, or the host's name. Reports an
    /// unusable name.
    pub(super) fn director(
        &mut self,
        written: Option<&Spanned<String>>,
        table: &Range<usize>,
    ) -> String {
        if let Some(name) = written {
            if !Cluster::is_name(name.get_ref()) {
                let title = format!("{:?} is not the name of a director", name.get_ref());
                self.report(Diagnostic::error(name.span(), title).help(
                    "use 1 to 128 characters without whitespace and slashes, and a different name on each director",
                ));
            }
            return name.get_ref().clone();
        }
        let uname = rustix::system::uname();
        let name = uname.nodename().to_string_lossy().into_owned();
        if !Cluster::is_name(&name) {
            self.report(
                Diagnostic::error(
                    table.clone(),
                    format!("the host name {name:?} cannot be used for this director"),
                )
                .help("add director = \"...\", a different name on each director"),
            );
        }
        name
    }

    fn prefix(&mut self, written: Option<&Spanned<String>>) -> String {
        let Some(written) = written else {
            return Cluster::PREFIX.to_owned();
        };
        let prefix = written.get_ref();
        let right = |c: char| !c.is_control() && !c.is_whitespace();
        if prefix.len() > Cluster::NAME_MAX || !prefix.ends_with('/') || !prefix.chars().all(right)
        {
            self.report(
                Diagnostic::error(written.span(), format!("{prefix:?} is not a prefix"))
                    .help("end the prefix with a slash, without whitespace: prefix = \"/lvs/\""),
            );
        }
        prefix.clone()
    }

    pub(super) fn source_time(
        &mut self,
        value: Option<&Spanned<RawDuration>>,
        key: &str,
        range: &RangeInclusive<Duration>,
        usual: Duration,
    ) -> Duration {
        let Some(value) = value else { return usual };
        let time = value.get_ref().0;
        if !range.contains(&time) {
            let (first, last) = (range.start(), range.end());
            self.report(
                Diagnostic::error(value.span(), format!("`{key}` is out of range"))
                    .help(format!("write a time from \"{first:?}\" to \"{last:?}\"")),
            );
        }
        time
    }

    /// Reads the members of etcd and the credentials for them, and reports errors in them. `None`
    /// without members.
    fn access(&mut self, spanned: &Spanned<RawCluster>) -> Option<Access> {
        let raw = spanned.get_ref();
        let Some(members) = &raw.etcd else {
            self.missing(
                &spanned.span(),
                "`etcd`",
                "add etcd = [\"https://10.0.0.5:2379\", ...]: the members of etcd",
            );
            return None;
        };
        let mut endpoints = Vec::new();
        for text in &members.get_ref().0 {
            match Endpoint::parse(text, etcd::PORT) {
                Some(endpoint) if endpoints.contains(&endpoint) => self.report(
                    Diagnostic::error(members.span(), format!("{text:?} is named twice"))
                        .help("name each member once"),
                ),
                Some(endpoint) => endpoints.push(endpoint),
                None => self.report(
                    Diagnostic::error(members.span(), format!("{text:?} is not a member of etcd"))
                        .help("write https:// or http://, its address or name, and its port: \"https://10.0.0.5:2379\""),
                ),
            }
        }
        if !(1..=MEMBERS_MAX).contains(&members.get_ref().0.len()) {
            let title = format!("there are {} members", members.get_ref().0.len());
            self.report(
                Diagnostic::error(members.span(), title)
                    .help(format!("write 1 to {MEMBERS_MAX} members")),
            );
        }
        self.certificate_with_key((raw.ca.as_ref(), raw.cert.as_ref(), raw.key.as_ref()));
        let tls = endpoints.iter().any(|one| one.secure);
        let files = [&raw.ca, &raw.cert, &raw.key];
        if let Some(file) = files.into_iter().flatten().next()
            && !tls
            && !endpoints.is_empty()
        {
            self.report(
                Diagnostic::warning(file.span(), "no member uses TLS: this file is not used")
                    .help("write https:// for the members, or leave this key out"),
            );
        }
        let tls = tls.then(|| {
            let files = (raw.ca.as_ref(), raw.cert.as_ref(), raw.key.as_ref());
            self.source_tls(
                &spanned.span(),
                files,
                "name the file with the certificate of the CA that has signed the members' certificates",
            )
        });
        let tls = tls.flatten();
        let login = self.login(raw);
        if let (Some(user), Some(_)) = (&raw.user, endpoints.iter().find(|one| !one.secure)) {
            self.report(
                Diagnostic::warning(user.span(), "the password crosses the network unencrypted")
                    .help("use TLS for the members: https://"),
            );
        }
        Some(Access {
            endpoints,
            tls,
            login,
            timeout: Cluster::TIMEOUT,
        })
    }

    pub(super) fn source_file(&mut self, path: Option<&Spanned<String>>) -> Option<Vec<u8>> {
        let path = path?;
        match read_file(path.get_ref()) {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                let title = format!("cannot read {:?}: {error}", path.get_ref());
                self.report(
                    Diagnostic::error(path.span(), title)
                        .help("write the path of a file that lvsd can read"),
                );
                None
            }
        }
    }

    /// Reads the certificate files of a source: the CA certificates, and the certificate and key of
    /// this client. `None` if the CA certificates are missing, or if a file is unusable, which is
    /// reported.
    pub(super) fn source_tls(
        &mut self,
        table: &Range<usize>,
        (ca, cert, key): Certificates<'_>,
        without_ca: &str,
    ) -> Option<Tls> {
        if ca.is_none() {
            self.missing(table, "`ca`", without_ca);
        }
        let (read_cert, read_key) = (self.source_file(cert), self.source_file(key));
        let authority = self.source_file(ca)?;
        if cert.is_some() != read_cert.is_some() || key.is_some() != read_key.is_some() {
            return None;
        }
        match Tls::authenticated(authority, read_cert, read_key) {
            Ok(tls) => Some(tls),
            Err((name, why, help)) => {
                let place = match name {
                    "ca" => ca,
                    "cert" => cert,
                    "key" => key,
                    _ => None,
                };
                let span = place.map_or_else(|| table.clone(), Spanned::span);
                self.report(Diagnostic::error(span, why).help(help));
                None
            }
        }
    }

    /// Checks that a certificate and its key are both present, or both absent.
    pub(super) fn certificate_with_key(&mut self, (_, cert, key): Certificates<'_>) {
        for (one, other, missing) in [(cert, key, "key"), (key, cert, "cert")] {
            if let (Some(one), None) = (one, other) {
                self.report(
                    Diagnostic::error(one.span(), format!("`{missing}` is missing"))
                        .help("set `cert` and `key`, or neither of them"),
                );
            }
        }
    }

    fn login(&mut self, raw: &RawCluster) -> Option<(String, Password)> {
        let (user, file) = match (&raw.user, &raw.password_file) {
            (Some(user), Some(file)) => (user, file),
            (None, None) => return None,
            (Some(user), None) => {
                self.report(
                    Diagnostic::error(user.span(), "`user` needs `password_file`")
                        .help("add password_file = \"...\", a file that only lvsd's user can read"),
                );
                return None;
            }
            (None, Some(file)) => {
                self.report(
                    Diagnostic::error(file.span(), "`password_file` needs `user`")
                        .help("add user = \"...\""),
                );
                return None;
            }
        };
        self.printable(user, "the user");
        let password = self.source_file(Some(file))?;
        if std::fs::metadata(file.get_ref()).is_ok_and(|meta| meta.mode() & 0o007 != 0) {
            self.report(
                Diagnostic::warning(file.span(), "all users of this host may read the password")
                    .help(format!(
                        "remove the rights of other users: chmod o= {}",
                        file.get_ref()
                    )),
            );
        }
        match String::from_utf8(password) {
            Ok(text) if !text.trim_end_matches(['\r', '\n']).is_empty() => {
                let password = text.trim_end_matches(['\r', '\n']).to_owned();
                Some((user.get_ref().clone(), Password(password)))
            }
            _ => {
                self.report(
                    Diagnostic::error(file.span(), "this file contains no password")
                        .help("write the password as the only line, in UTF-8"),
                );
                None
            }
        }
    }

    /// Returns the name of a pool, or reports an invalid name and returns `None`.
    pub(super) fn pool(&mut self, pool: &Spanned<String>) -> Option<String> {
        let name = pool.get_ref();
        if !Cluster::is_name(name) {
            self.report(
                Diagnostic::error(pool.span(), format!("{name:?} is not the name of a pool"))
                    .help("write the part of the keys after servers/, without whitespace and slashes: { etcd = \"web\" }"),
            );
            return None;
        }
        Some(name.clone())
    }

    /// Reports services with an etcd pool if the configuration has no `[cluster]`: the servers of
    /// the pool would never be read.
    pub(super) fn pools_without_etcd(&mut self, raw: &RawConfig) {
        if raw.cluster.is_some() {
            return;
        }
        for service in &raw.service {
            let discover = service.get_ref().discover.as_ref();
            if let Some(pool) = discover.and_then(|discover| discover.get_ref().etcd.as_ref()) {
                self.report(
                    Diagnostic::error(pool.span(), "the file has no [cluster]").help(
                        "add [cluster] with etcd = [\"https://10.0.0.5:2379\"] to the main file",
                    ),
                );
            }
        }
    }
}

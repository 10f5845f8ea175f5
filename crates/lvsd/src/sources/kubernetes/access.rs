//! Reads the address of the API server and the credentials from a kubeconfig file or from the files
//! of a pod.

use std::collections::HashSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::sources::base64;
use crate::text::read_file;

/// Directory of a pod's ServiceAccount files.
pub(crate) const POD: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// Token of this client, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub enum Token {
    /// A file with a token, which is read for each request.
    File(PathBuf),
    /// A token in a kubeconfig file, which is read at the start and at a reload.
    Text(String),
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "the token in {}", path.display()),
            Self::Text(_) => f.write_str("a token"),
        }
    }
}

/// An API server and credentials, which are never printed. Certificates have been read from their
/// files.
pub(crate) struct Access {
    pub(crate) server: String,
    pub(crate) ca: Option<Vec<u8>>,
    pub(crate) cert: Option<Vec<u8>>,
    pub(crate) key: Option<Vec<u8>>,
    pub(crate) token: Option<Token>,
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "access to {}", self.server)
    }
}

/// The reason why the API server cannot be used, and the fix.
pub(crate) type Wrong = (String, String);

fn wrong<T>(what: impl Into<String>, help: impl Into<String>) -> Result<T, Wrong> {
    Err((what.into(), help.into()))
}

/// The parts of a kubeconfig file that lvsd uses.
#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct File {
    current_context: Option<String>,
    contexts: Option<Vec<NamedContext>>,
    clusters: Option<Vec<NamedCluster>>,
    users: Option<Vec<NamedUser>>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NamedContext {
    name: String,
    context: Option<Context>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NamedCluster {
    name: String,
    cluster: Option<Cluster>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Cluster {
    server: String,
    certificate_authority: Option<String>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: Option<bool>,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct NamedUser {
    name: String,
    user: Option<User>,
}

#[derive(Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct User {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<String>,
    client_certificate: Option<String>,
    client_certificate_data: Option<String>,
    client_key: Option<String>,
    client_key_data: Option<String>,
    exec: Option<IgnoredAny>,
    auth_provider: Option<IgnoredAny>,
    username: Option<IgnoredAny>,
    #[serde(rename = "as")]
    impersonated: Option<IgnoredAny>,
}

/// Treats an empty text as a missing one (`None`).
fn some(text: Option<&String>) -> Option<&String> {
    text.filter(|text| !text.is_empty())
}

/// Returns the decoded base64 data in the kubeconfig or, without such data, the content of a file;
/// `None` if both are missing.
fn bytes(
    directory: &Path,
    (key, file, data): (&str, Option<&String>, Option<&String>),
) -> Result<Option<Vec<u8>>, Wrong> {
    if let Some(data) = some(data) {
        let data: String = data.split_whitespace().collect();
        return match base64::decode(&data) {
            Some(bytes) => Ok(Some(bytes)),
            None => wrong(
                format!("`{key}-data` is not base64"),
                "write the kubeconfig again, for example with kubectl config view --raw --flatten --minify",
            ),
        };
    }
    let Some(file) = some(file) else {
        return Ok(None);
    };
    // Paths in a kubeconfig file are relative to its directory.
    let path = directory.join(file).display().to_string();
    match read_file(&path) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) => wrong(
            format!("cannot read `{key}`, {path:?}: {error}"),
            "let lvsd read this file, or put its content into the kubeconfig: kubectl config view --raw --flatten --minify",
        ),
    }
}

impl Access {
    /// Reads a context of a kubeconfig file; by default the current one.
    pub(crate) fn by_kubeconfig(path: &str, context: Option<&str>) -> Result<Self, Wrong> {
        let text = match read_file(path) {
            Ok(text) => text,
            Err(error) => {
                return wrong(
                    format!("cannot read {path:?}: {error}"),
                    "write the path of a file that lvsd can read",
                );
            }
        };
        let file: File = match serde_saphyr::from_slice(&text) {
            Ok(file) => file,
            // The error may quote a secret, so only its position is shown.
            Err(error) => {
                let place = error
                    .location()
                    .map(|at| format!(" (error at line {})", at.line()));
                return wrong(
                    format!("{path:?} is not a kubeconfig{}", place.unwrap_or_default()),
                    "check it with kubectl --kubeconfig FILE config view",
                );
            }
        };
        let directory = Path::new(path).parent().unwrap_or(Path::new(""));
        file.access(directory, context)
    }

    /// Reads the ServiceAccount files in `directory`. `host` and `port` are the values of
    /// `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`; if `host` is missing or empty, the
    /// result is `None`. The default port is 443.
    pub(crate) fn in_pod(
        host: Option<String>,
        port: Option<String>,
        directory: &str,
    ) -> Option<Result<Self, Wrong>> {
        let host = host.filter(|host| !host.is_empty())?;
        let host = match host.contains(':') {
            true => format!("[{host}]"),
            false => host,
        };
        let port = port.filter(|port| !port.is_empty());
        let port = port.unwrap_or_else(|| "443".to_owned());
        let file = |name: &str| Path::new(directory).join(name);
        let (ca, token) = (file("ca.crt"), file("token"));
        let read = read_file(&ca.display().to_string());
        let there = read.and_then(|read| std::fs::metadata(&token).map(|_| read));
        Some(match there {
            Ok(ca) => Ok(Self {
                server: format!("https://{host}:{port}"),
                ca: Some(ca),
                cert: None,
                key: None,
                token: Some(Token::File(token)),
            }),
            Err(error) => wrong(
                format!("cannot read `ca.crt` and the token of this pod in {directory}: {error}"),
                "set automountServiceAccountToken: true in the pod, or set `server`, `ca` and `token_file`",
            ),
        })
    }
}

impl File {
    fn access(&self, directory: &Path, context: Option<&str>) -> Result<Access, Wrong> {
        let current = some(self.current_context.as_ref()).map(String::as_str);
        let Some(name) = context.or(current) else {
            return wrong(
                "the kubeconfig has no current context",
                "add `context` to [kubernetes], or run kubectl config use-context NAME",
            );
        };
        let contexts = self.contexts.as_deref().unwrap_or_default();
        let found = contexts.iter().find(|one| one.name == name);
        let Some(context) = found.and_then(|one| one.context.as_ref()) else {
            let names: HashSet<&str> = contexts.iter().map(|one| one.name.as_str()).collect();
            let mut names: Vec<&str> = names.into_iter().take(10).collect();
            names.sort_unstable();
            return wrong(
                format!("the kubeconfig has no context {name:?}"),
                match names.is_empty() {
                    true => "add the context to the kubeconfig".to_owned(),
                    false => format!("use one of its contexts, such as {}", names.join(", ")),
                },
            );
        };
        let clusters = self.clusters.as_deref().unwrap_or_default();
        let found = clusters.iter().find(|one| one.name == context.cluster);
        let Some(cluster) = found.and_then(|one| one.cluster.as_ref()) else {
            return wrong(
                format!("the kubeconfig has no cluster {:?}", context.cluster),
                format!("correct the context {name:?}"),
            );
        };
        let users = self.users.as_deref().unwrap_or_default();
        let found = users.iter().find(|one| one.name == context.user);
        let Some(user) = found.and_then(|one| one.user.as_ref()) else {
            return wrong(
                format!("the kubeconfig has no user {:?}", context.user),
                format!("correct the context {name:?}"),
            );
        };
        user.is_usable()?;
        cluster.is_usable()?;
        let certificates = [
            (
                "certificate-authority",
                &cluster.certificate_authority,
                &cluster.certificate_authority_data,
            ),
            (
                "client-certificate",
                &user.client_certificate,
                &user.client_certificate_data,
            ),
            ("client-key", &user.client_key, &user.client_key_data),
        ];
        let read = certificates
            .map(|(key, file, data)| bytes(directory, (key, file.as_ref(), data.as_ref())));
        let [ca, cert, key] = read;
        let (ca, cert, key) = (ca?, cert?, key?);
        if cert.is_some() != key.is_some() {
            return wrong(
                format!(
                    "the user {:?} of the kubeconfig has a client certificate without its key, or a key without its certificate",
                    context.user
                ),
                "configure both, or neither",
            );
        }
        let token = match (some(user.token_file.as_ref()), some(user.token.as_ref())) {
            (Some(file), _) => Some(Token::File(directory.join(file))),
            (None, Some(text)) => Some(Token::Text(text.clone())),
            (None, None) => None,
        };
        Ok(Access {
            server: cluster.server.clone(),
            ca,
            cert,
            key,
            token,
        })
    }
}

impl Cluster {
    fn is_usable(&self) -> Result<(), Wrong> {
        if self.insecure_skip_tls_verify == Some(true) {
            return wrong(
                "the kubeconfig sets `insecure-skip-tls-verify`: lvsd always checks the API server's certificate",
                "write `certificate-authority` instead",
            );
        }
        let names = [
            ("tls-server-name", &self.tls_server_name),
            ("proxy-url", &self.proxy_url),
        ];
        for (key, value) in names {
            if some(value.as_ref()).is_some() {
                return wrong(
                    format!("the kubeconfig has `{key}`, which lvsd does not support"),
                    "use an address of the API server that is in its certificate, and that lvsd can reach directly",
                );
            }
        }
        Ok(())
    }
}

impl User {
    fn is_usable(&self) -> Result<(), Wrong> {
        const TOKEN: &str = "use the token of a ServiceAccount (contrib/kubernetes/rbac.yaml) or a client certificate";
        if self.exec.is_some() {
            return wrong(
                "the user of the kubeconfig has an `exec` plug-in: lvsd runs no programs of a kubeconfig",
                TOKEN,
            );
        }
        if self.auth_provider.is_some() {
            return wrong(
                "the user of the kubeconfig has an `auth-provider`, which Kubernetes has removed",
                TOKEN,
            );
        }
        if self.username.is_some() {
            return wrong(
                "the user of the kubeconfig has a `username`: API servers do not accept passwords",
                TOKEN,
            );
        }
        if self.impersonated.is_some() {
            return wrong(
                "the user of the kubeconfig acts `as` another user, which lvsd does not support",
                TOKEN,
            );
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONFIG: &str = r#"
apiVersion: v1
kind: Config
current-context: "shop"
preferences: {}
contexts:
- name: shop
  context: {cluster: c1, user: token, namespace: other}
- context:
    cluster: c1
    user: file
  name: files
- name: certificate
  context: { cluster: c2, user: certificate }
- name: plug-in
  context: { cluster: c1, user: plug-in }
- name: lost
  context: { cluster: c1, user: nobody }
- name: half
  context: { cluster: c1, user: half }
- name: insecure
  context: { cluster: insecure, user: token }
- name: base64
  context: { cluster: base64, user: token }
- name: away
  context: { cluster: away, user: token }
- name: password
  context: { cluster: c1, user: password }
clusters:
- name: c1
  cluster:
    server: https://10.0.0.5:6443
    certificate-authority-data: &ca Y2VydGlmaWNhdGU=
    certificate-authority: /nowhere
- name: c2
  cluster: { server: "https://[2001:db8::5]:6443", certificate-authority: ca.crt }
- name: insecure
  cluster: { server: "https://x", insecure-skip-tls-verify: true }
- name: base64
  cluster: { server: "https://x", certificate-authority-data: "?" }
- name: away
  cluster: { server: "https://x", certificate-authority: nowhere.crt }
users:
- name: token
  user: { token: s3cret }
- name: file
  user: { token: s3cret, tokenFile: token }
- name: certificate
  user: { client-certificate-data: eA==, client-key: key.pem }
- name: half
  user: { client-certificate-data: eA== }
- name: plug-in
  user:
    exec:
      apiVersion: client.authentication.k8s.io/v1
      command: aws
      args: [eks, get-token]
- name: password
  user: { username: admin, password: s3cret }
"#;

    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, text) in [
            ("config", CONFIG),
            ("ca.crt", "authority"),
            ("key.pem", "key"),
        ] {
            std::fs::write(directory.path().join(name), text).unwrap();
        }
        directory
    }

    fn access(directory: &tempfile::TempDir, context: Option<&str>) -> Result<Access, Wrong> {
        let path = directory.path().join("config");
        Access::by_kubeconfig(path.to_str().unwrap(), context)
    }

    #[test]
    fn kubeconfig_current_context_has_server_authority_and_token() {
        let access = access(&directory(), None).unwrap();
        assert_eq!(access.server, "https://10.0.0.5:6443");
        assert_eq!(access.ca.as_deref(), Some(&b"certificate"[..]));
        assert_eq!(access.token, Some(Token::Text("s3cret".to_owned())));
        assert!(access.cert.is_none() && access.key.is_none());
        assert!(!format!("{access:?}").contains("s3cret"));
    }

    #[test]
    fn kubeconfig_file_paths_are_relative_to_its_directory() {
        let directory = directory();
        let files = access(&directory, Some("files")).unwrap();
        let token = directory.path().join("token");
        assert_eq!(files.token, Some(Token::File(token)));
        let certificate = access(&directory, Some("certificate")).unwrap();
        assert_eq!(certificate.server, "https://[2001:db8::5]:6443");
        assert_eq!(certificate.ca.as_deref(), Some(&b"authority"[..]));
        assert_eq!(certificate.cert.as_deref(), Some(&b"x"[..]));
        assert_eq!(certificate.key.as_deref(), Some(&b"key"[..]));
        assert_eq!(certificate.token, None);
    }

    #[test]
    fn invalid_or_unsupported_kubeconfig_is_refused_with_a_fix() {
        let directory = directory();
        for (context, words) in [
            ("plug-in", "lvsd runs no programs of a kubeconfig"),
            ("nothing", "no context \"nothing\""),
            ("lost", "no user \"nobody\""),
            ("half", "a client certificate without its key"),
            ("insecure", "always checks the API server's certificate"),
            ("base64", "`certificate-authority-data` is not base64"),
            ("away", "nowhere.crt"),
            ("password", "do not accept passwords"),
        ] {
            let (what, help) = access(&directory, Some(context)).unwrap_err();
            assert!(what.contains(words), "{context}: no {words:?} in {what}");
            assert!(
                !help.is_empty() && !what.contains("s3cret"),
                "{context}: {what}"
            );
        }
    }

    #[test]
    fn invalid_or_missing_kubeconfig_is_refused_without_quoting_its_text() {
        let directory = directory();
        let path = directory.path().join("config");
        for text in ["s3cret", "users: s3cret", "a: [", "users: *nowhere\n"] {
            std::fs::write(&path, text).unwrap();
            let (what, _) = access(&directory, None).unwrap_err();
            assert!(
                what.contains("is not a kubeconfig"),
                "{text}: no `is not a kubeconfig` in {what}"
            );
            assert!(!what.contains("s3cret"), "unexpected `s3cret` in {what}");
        }
        std::fs::write(&path, "kind: Config\n").unwrap();
        let (what, _) = access(&directory, None).unwrap_err();
        assert!(
            what.contains("current context"),
            "no `current context` in {what}"
        );
        std::fs::remove_file(&path).unwrap();
        let (what, _) = access(&directory, None).unwrap_err();
        assert!(what.contains("cannot read"), "no `cannot read` in {what}");
    }

    #[test]
    fn pod_access_uses_environment_and_service_account_files_or_is_refused_without_token() {
        let directory = directory();
        let pod = |host: &str, port: &str| {
            let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            Access::in_pod(some(host), some(port), directory.path().to_str().unwrap())
        };
        assert!(pod("", "443").is_none());
        let (what, help) = pod("10.96.0.1", "443").unwrap().unwrap_err();
        assert!(what.contains("the token of this pod") && help.contains("automount"));
        std::fs::write(directory.path().join("token"), "t\n").unwrap();
        let access = pod("10.96.0.1", "6443").unwrap().unwrap();
        assert_eq!(access.server, "https://10.96.0.1:6443");
        assert_eq!(access.ca.as_deref(), Some(&b"authority"[..]));
        let token = directory.path().join("token");
        assert_eq!(access.token, Some(Token::File(token)));
        assert_eq!(
            pod("fd00::1", "").unwrap().unwrap().server,
            "https://[fd00::1]:443"
        );
    }
}

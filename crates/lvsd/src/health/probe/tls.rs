//! TLS for checks: rustls with graviola, which needs no C compiler and some features of the
//! processor; or with ring.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::net::SocketAddr;
use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::ProbeError;
use crate::config::{Diagnostic, Keys};

/// How a server is met.
#[derive(Clone)]
pub(crate) struct Tls {
    /// What it was made of: two with the same do the same.
    made_of: Arc<MadeOf>,
    config: Arc<ClientConfig>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct MadeOf {
    ca: Option<Vec<u8>>,
    cert: Option<Vec<u8>>,
    key: Option<Secret>,
    /// The name that it has to have, and is asked for.
    sni: Option<String>,
}

/// A private key, which nobody is shown.
#[derive(PartialEq, Eq, Hash)]
struct Secret(Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.made_of.fmt(f)
    }
}

impl PartialEq for Tls {
    fn eq(&self, other: &Self) -> bool {
        self.made_of == other.made_of
    }
}

impl Eq for Tls {}

impl Hash for Tls {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.made_of.hash(state);
    }
}

/// The cryptography of this build; or why there is none.
pub(super) fn provider() -> Result<Arc<CryptoProvider>, String> {
    #[cfg(feature = "ring")]
    return Ok(Arc::new(rustls::crypto::ring::default_provider()));
    #[cfg(all(feature = "graviola", not(feature = "ring")))]
    {
        let missing = missing();
        if missing.is_empty() {
            return Ok(Arc::new(rustls_graviola::default_provider()));
        }
        Err(format!(
            "this lvsd's TLS (graviola) needs a processor with {}; install it with `cargo install lvsd --features ring`, \
             which needs a C compiler",
            missing.join(", ")
        ))
    }
    #[cfg(not(any(feature = "graviola", feature = "ring")))]
    Err(
        "this lvsd was built without TLS; build it with the feature `graviola` or `ring`"
            .to_owned(),
    )
}

/// What graviola needs of the processor, and this one does not have: it would panic.
#[cfg(all(feature = "graviola", not(feature = "ring")))]
fn missing() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    let has = [
        ("adx", std::arch::is_x86_feature_detected!("adx")),
        ("aes", std::arch::is_x86_feature_detected!("aes")),
        ("avx", std::arch::is_x86_feature_detected!("avx")),
        ("avx2", std::arch::is_x86_feature_detected!("avx2")),
        ("bmi1", std::arch::is_x86_feature_detected!("bmi1")),
        (
            "pclmulqdq",
            std::arch::is_x86_feature_detected!("pclmulqdq"),
        ),
    ];
    #[cfg(target_arch = "aarch64")]
    let has = [
        ("aes", std::arch::is_aarch64_feature_detected!("aes")),
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("pmull", std::arch::is_aarch64_feature_detected!("pmull")),
        ("sha2", std::arch::is_aarch64_feature_detected!("sha2")),
    ];
    let lacking = has.iter().filter(|(_, there)| !there);
    lacking.map(|(name, _)| *name).collect()
}

impl Tls {
    /// Reads the keys `sni`, `ca`, `cert` and `key`; `host` is the name that the server has by
    /// HTTP.
    pub(super) fn parse(keys: &mut Keys<'_>, host: Option<&str>) -> Option<Self> {
        let ca = keys.file("ca")?;
        let cert = keys.file("cert")?;
        let key = keys.file("key")?.map(Secret);
        let own = keys.string("sni")?;
        // The port is no part of the name.
        let of_host = host.map(|host| match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host,
        });
        let sni = own
            .clone()
            .or_else(|| of_host.map(|name| name.trim_matches(['[', ']']).to_owned()));
        if sni
            .as_ref()
            .is_some_and(|name| ServerName::try_from(name.as_str()).is_err())
        {
            let at = keys.place(if own.is_some() { "sni" } else { "host" });
            keys.report(Diagnostic::error(at, "not the name of a host").help(
                "write the name that is in the server's certificate: sni = \"www.example.org\"",
            ));
            return None;
        }
        let made_of = MadeOf { ca, cert, key, sni };
        match config(&made_of) {
            Ok(config) => Some(Self {
                made_of: Arc::new(made_of),
                config: Arc::new(config),
            }),
            Err((key, why, help)) => {
                let at = keys.place(key);
                keys.report(Diagnostic::error(at, why).help(help));
                None
            }
        }
    }

    /// How a server is met that `ca` has to have signed, and that may want to know who we are.
    ///
    /// # Errors
    /// The key where it is wrong, why, and what to do.
    pub(crate) fn authenticated(
        ca: Vec<u8>,
        cert: Option<Vec<u8>>,
        key: Option<Vec<u8>>,
    ) -> Result<Self, Wrong> {
        let made_of = MadeOf {
            ca: Some(ca),
            cert,
            key: key.map(Secret),
            sni: None,
        };
        let config = Arc::new(config(&made_of)?);
        let made_of = Arc::new(made_of);
        Ok(Self { made_of, config })
    }

    /// Talks TLS with the server of that name or address.
    ///
    /// # Errors
    /// Why not, in words.
    pub(crate) async fn meet_as<S>(&self, stream: S, name: &str) -> Result<TlsStream<S>, String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = ServerName::try_from(name.to_owned()).map_err(|error| error.to_string())?;
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let met = connector.connect(name, stream).await;
        met.map_err(|error| error.to_string())
    }

    /// What a check without any key of its own does.
    pub(super) fn plain() -> Option<Self> {
        let made_of = MadeOf {
            ca: None,
            cert: None,
            key: None,
            sni: None,
        };
        let config = Arc::new(config(&made_of).ok()?);
        let made_of = Arc::new(made_of);
        Some(Self { made_of, config })
    }

    /// The name that `server` has to have.
    fn name(&self, server: SocketAddr) -> ServerName<'static> {
        let named = self.made_of.sni.clone();
        let named = named.and_then(|name| ServerName::try_from(name).ok());
        named.unwrap_or_else(|| ServerName::from(server.ip()))
    }

    /// Talks TLS with `server` over a connection to it.
    pub(super) async fn meet<S>(
        &self,
        stream: S,
        server: SocketAddr,
    ) -> Result<TlsStream<S>, ProbeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let met = connector.connect(self.name(server), stream).await;
        met.map_err(|error| ProbeError::Server(format!("{server}: TLS: {error}")))
    }
}

/// Where it is wrong, why, and what to do.
pub(crate) type Wrong = (&'static str, String, String);

fn config(of: &MadeOf) -> Result<ClientConfig, Wrong> {
    let provider =
        provider().map_err(|why| ("type", "`https` is not to be had here".to_owned(), why))?;
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| ("type", error.to_string(), "report this".to_owned()))?;
    let verifier: Arc<dyn ServerCertVerifier> = match &of.ca {
        None => Arc::new(Anybody(provider)),
        Some(pem) => {
            let help = "give a file with certificates in PEM, that of the authority that has signed the server's";
            let wrong = |why: String| ("ca", why, help.to_owned());
            let mut roots = RootCertStore::empty();
            for certificate in certificates(pem).map_err(wrong)? {
                roots
                    .add(certificate)
                    .map_err(|error| wrong(error.to_string()))?;
            }
            WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
                .build()
                .map_err(|error| wrong(error.to_string()))?
        }
    };
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    let mut config = match (&of.cert, &of.key) {
        (None, None) => builder.with_no_client_auth(),
        (Some(cert), Some(key)) => {
            let help = "give a file with a private key in PEM, that of the certificate in `cert`";
            let wrong = |why: String| ("key", why, help.to_owned());
            let chain = certificates(cert).map_err(|why| {
                let help = "give a file with certificates in PEM, lvsd's own first";
                ("cert", why, help.to_owned())
            })?;
            let key = PrivateKeyDer::from_pem_slice(&key.0)
                .map_err(|error| wrong(format!("no private key: {error}")))?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| wrong(error.to_string()))?
        }
        (Some(_), None) => {
            let help = "add `key`, the file with its private key".to_owned();
            return Err(("cert", "a certificate without its key".to_owned(), help));
        }
        (None, Some(_)) => {
            let help = "add `cert`, the file with its certificate".to_owned();
            return Err(("key", "a key without its certificate".to_owned(), help));
        }
    };
    // Each check is to show that the server can do all of it.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err("there is no certificate in it".to_owned()),
        Err(error) => Err(format!("not certificates: {error}")),
    }
}

/// Takes any certificate: who asks without an authority wants to know whether the server serves,
/// not who it is.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

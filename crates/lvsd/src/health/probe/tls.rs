//! TLS for checks, etcd and Kubernetes: rustls with graviola, which needs no C compiler but some
//! features of the processor; or with ring.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{ActiveKeyExchange, CipherSuiteCommon, CryptoProvider, SupportedKxGroup};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    AlertDescription, ClientConfig, DigitallySignedStruct, NamedGroup, RootCertStore,
    SignatureScheme, SupportedCipherSuite, Tls12CipherSuite,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::ProbeError;
use crate::health::{Code, Reason};
use crate::text::{Diagnostic, Keys};

/// TLS settings of a connection to a server.
#[derive(Clone)]
pub(crate) struct Tls {
    /// The settings from which `config` was made. Two clients with equal settings are equal.
    made_of: Arc<MadeOf>,
    config: Arc<ClientConfig>,
    /// The configuration for a second attempt, with a TLS 1.2 server that requires the curve of its
    /// certificate.
    curves: Option<Arc<ClientConfig>>,
}

#[derive(Debug, PartialEq, Eq, Hash)]
struct MadeOf {
    ca: Option<Vec<u8>>,
    cert: Option<Vec<u8>>,
    key: Option<Secret>,
    /// The server's name that the client sends and, with `ca`, that the certificate must contain;
    /// `None` for the server's address.
    sni: Option<String>,
}

/// A private key, which is never displayed.
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

/// The cryptographic provider of this build, or the reason why there is none.
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

/// The instructions that graviola requires and this processor lacks: graviola would panic.
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
    /// Reads the keys `sni`, `ca`, `cert` and `key`; `host` is the server's name in HTTP requests.
    /// `None` after an error, which is reported.
    pub(super) fn parse(keys: &mut Keys<'_>, host: Option<&str>) -> Option<Self> {
        let ca = keys.file("ca")?;
        let cert = keys.file("cert")?;
        let key = keys.file("key")?.map(Secret);
        let own = keys.string("sni")?;
        // The port is not part of the name.
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
            let key = if own.is_some() { "sni" } else { "host" };
            let at = keys.place(key);
            keys.report(
                Diagnostic::error(at, format!("`{key}` is not the name of a host")).help(
                    "write the name that is in the server's certificate: sni = \"www.example.org\"",
                ),
            );
            return None;
        }
        let made_of = MadeOf { ca, cert, key, sni };
        let configs = config(&made_of, false).and_then(|first| {
            let curves = made_of.ca.is_none().then(|| config(&made_of, true));
            Ok((first, curves.transpose()?))
        });
        match configs {
            Ok((config, curves)) => Some(Self {
                made_of: Arc::new(made_of),
                config: Arc::new(config),
                curves: curves.map(Arc::new),
            }),
            Err((key, why, help)) => {
                let at = keys.place(key);
                keys.report(Diagnostic::error(at, why).help(help));
                None
            }
        }
    }

    /// A client that accepts only certificates that `ca` has signed, and that can present a
    /// certificate itself.
    ///
    /// # Errors
    /// The key with the invalid value, the reason, and a fix.
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
        let config = Arc::new(config(&made_of, false)?);
        let made_of = Arc::new(made_of);
        Ok(Self {
            made_of,
            config,
            curves: None,
        })
    }

    /// Performs a TLS handshake with the server; `name` is its name or address.
    ///
    /// # Errors
    /// `name` is invalid, or the handshake fails; the text is the reason.
    pub(crate) async fn meet_as<S>(&self, stream: S, name: &str) -> Result<TlsStream<S>, String>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let name = ServerName::try_from(name.to_owned()).map_err(|error| error.to_string())?;
        let connector = TlsConnector::from(Arc::clone(&self.config));
        let met = connector.connect(name, stream).await;
        met.map_err(|error| error.to_string())
    }

    /// The TLS settings of a check without TLS keys, and without a second attempt; `None` if this
    /// build or processor has no TLS.
    pub(super) fn plain() -> Option<Self> {
        let made_of = MadeOf {
            ca: None,
            cert: None,
            key: None,
            sni: None,
        };
        let config = Arc::new(config(&made_of, false).ok()?);
        let made_of = Arc::new(made_of);
        Some(Self {
            made_of,
            config,
            curves: None,
        })
    }

    /// The name of `server` for the handshake.
    fn name(&self, server: SocketAddr) -> ServerName<'static> {
        let named = self.made_of.sni.clone();
        let named = named.and_then(|name| ServerName::try_from(name).ok());
        named.unwrap_or_else(|| ServerName::from(server.ip()))
    }

    /// Performs a TLS handshake with `server` over a connection to it.
    pub(super) async fn meet<S>(
        &self,
        stream: S,
        server: SocketAddr,
    ) -> Result<TlsStream<S>, ProbeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let met = self.attempt(&self.config, stream, server).await;
        met.map_err(|error| failed(&error, server))
    }

    /// Performs a TLS handshake over a connection that `open` opens. Without a CA, a refused
    /// handshake is repeated once, with other parameters and over another connection.
    pub(super) async fn meet_by<S, F>(
        &self,
        open: impl Fn() -> F,
        server: SocketAddr,
    ) -> Result<TlsStream<S>, ProbeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
        F: Future<Output = Result<S, ProbeError>>,
    {
        let error = match self.attempt(&self.config, open().await?, server).await {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if let (Some(config), true) = (&self.curves, is_refused(&error))
            && let Ok(stream) = self.attempt(config, open().await?, server).await
        {
            return Ok(stream);
        }
        Err(failed(&error, server))
    }

    async fn attempt<S>(
        &self,
        config: &Arc<ClientConfig>,
        stream: S,
        server: SocketAddr,
    ) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let connector = TlsConnector::from(Arc::clone(config));
        connector.connect(self.name(server), stream).await
    }
}

/// Converts the error of a failed handshake with `server`.
fn failed(error: &io::Error, server: SocketAddr) -> ProbeError {
    let reason = Reason::from(format!("{server}: TLS: {error}"));
    ProbeError::Server(match of_tls(error) {
        Some(rustls::Error::InvalidCertificate(_)) => {
            let fix = format!(
                "on {}: renew or replace the certificate (openssl x509 -noout -dates -subject -in FILE); or correct \
                 `ca` and `sni` of the check",
                server.ip()
            );
            reason.of(Code::Certificate).with_fix(fix)
        }
        _ => reason,
    })
}

/// The TLS error inside the error of a stream; `None` if the stream failed for another reason.
fn of_tls(error: &io::Error) -> Option<&rustls::Error> {
    error.get_ref()?.downcast_ref()
}

/// Whether the server refused the handshake because it supports none of the offered parameters.
fn is_refused(error: &io::Error) -> bool {
    let inner = of_tls(error);
    let refused = rustls::Error::AlertReceived(AlertDescription::HandshakeFailure);
    inner == Some(&refused)
}

/// The configuration key with the invalid value, the reason and the fix.
pub(crate) type Wrong = (&'static str, String, String);

/// Creates the configuration of a client. With `curves`, it is for TLS 1.2 only, and also offers
/// curves that are used only in certificates.
fn config(of: &MadeOf, curves: bool) -> Result<ClientConfig, Wrong> {
    let provider =
        provider().map_err(|why| ("type", "TLS is not available in this lvsd".to_owned(), why))?;
    let provider = match of.ca {
        None if curves => naming_curves(&lenient(&provider)),
        None => lenient(&provider),
        Some(_) => provider,
    };
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider));
    let builder = match curves {
        true => builder.with_protocol_versions(&[&rustls::version::TLS12]),
        false => builder.with_safe_default_protocol_versions(),
    };
    let builder = builder.map_err(|error| {
        (
            "type",
            error.to_string(),
            "this is an internal error of lvsd: report it".to_owned(),
        )
    })?;
    let verifier: Arc<dyn ServerCertVerifier> = match &of.ca {
        None => Arc::new(AnyCertificate),
        Some(pem) => {
            let help = "use a file in PEM format with the certificate of the CA that has signed the server's certificate";
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
            let help = "use a file in PEM format with the private key of the certificate in `cert`";
            let wrong = |why: String| ("key", why, help.to_owned());
            let chain = certificates(cert).map_err(|why| {
                let help = "use a file in PEM format whose first certificate is lvsd's own";
                ("cert", why, help.to_owned())
            })?;
            let key = PrivateKeyDer::from_pem_slice(&key.0).map_err(|error| {
                wrong(format!("the file contains no valid private key: {error}"))
            })?;
            builder
                .with_client_auth_cert(chain, key)
                .map_err(|error| wrong(error.to_string()))?
        }
        (Some(_), None) => {
            let help = "add `key`, the file with its private key".to_owned();
            return Err(("cert", "`cert` needs `key`".to_owned(), help));
        }
        (None, Some(_)) => {
            let help = "add `cert`, the file with its certificate".to_owned();
            return Err(("key", "`key` needs `cert`".to_owned(), help));
        }
    };
    // Each check must show that the server can do a full handshake.
    config.resumption = rustls::client::Resumption::disabled();
    Ok(config)
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match all {
        Ok(all) if !all.is_empty() => Ok(all),
        Ok(_) => Err("the file contains no certificate".to_owned()),
        Err(error) => Err(format!("the file contains no valid certificates: {error}")),
    }
}

/// The provider for checks without a CA. Its TLS 1.2 suites accept a signature of any kind of key,
/// because [`AnyCertificate`] does not verify it.
fn lenient(provider: &CryptoProvider) -> Arc<CryptoProvider> {
    static LENIENT: OnceLock<Arc<CryptoProvider>> = OnceLock::new();
    static TLS12: OnceLock<Vec<Tls12CipherSuite>> = OnceLock::new();
    let lenient = LENIENT.get_or_init(|| {
        let suites = provider.cipher_suites.iter();
        let tls12 = suites.clone().filter_map(|suite| match suite {
            SupportedCipherSuite::Tls12(suite) => Some(Tls12CipherSuite {
                common: CipherSuiteCommon { ..suite.common },
                sign: SCHEMES,
                ..**suite
            }),
            SupportedCipherSuite::Tls13(_) => None,
        });
        let tls12 = TLS12.get_or_init(|| tls12.collect()).iter();
        let tls13 = suites.filter(|suite| matches!(suite, SupportedCipherSuite::Tls13(_)));
        let tls12 = tls12.map(SupportedCipherSuite::Tls12);
        Arc::new(CryptoProvider {
            cipher_suites: tls13.copied().chain(tls12).collect(),
            ..provider.clone()
        })
    });
    Arc::clone(lenient)
}

/// A curve that the client offers but does not use. A TLS 1.2 server sends a certificate only if
/// the certificate's curve is among the curves that the client offers for the key exchange.
#[derive(Debug)]
struct CurveName(NamedGroup);

impl SupportedKxGroup for CurveName {
    fn start(&self) -> Result<Box<dyn ActiveKeyExchange>, rustls::Error> {
        let why = format!("no keys are exchanged with {:?}", self.0);
        Err(rustls::Error::General(why))
    }

    fn name(&self) -> NamedGroup {
        self.0
    }
}

/// The provider with more curves for certificates: P-521, secp256k1 and those of Brainpool.
fn naming_curves(provider: &CryptoProvider) -> Arc<CryptoProvider> {
    static CURVES: [CurveName; 5] = [
        CurveName(NamedGroup::secp521r1),
        CurveName(NamedGroup::Unknown(22)),
        CurveName(NamedGroup::Unknown(26)),
        CurveName(NamedGroup::Unknown(27)),
        CurveName(NamedGroup::Unknown(28)),
    ];
    let mut provider = provider.clone();
    let curves = CURVES.iter().map(|one| one as &dyn SupportedKxGroup);
    // After the other groups: a server that uses the client's order chooses one of those.
    provider.kx_groups.extend(curves);
    Arc::new(provider)
}

/// All signature schemes that a server may use, the usual ones first.
const SCHEMES: &[SignatureScheme] = &[
    SignatureScheme::ECDSA_NISTP256_SHA256,
    SignatureScheme::ECDSA_NISTP384_SHA384,
    SignatureScheme::ECDSA_NISTP521_SHA512,
    SignatureScheme::ED25519,
    SignatureScheme::ED448,
    SignatureScheme::RSA_PSS_SHA256,
    SignatureScheme::RSA_PSS_SHA384,
    SignatureScheme::RSA_PSS_SHA512,
    SignatureScheme::RSA_PKCS1_SHA256,
    SignatureScheme::RSA_PKCS1_SHA384,
    SignatureScheme::RSA_PKCS1_SHA512,
    // Keys for RSA-PSS only (rsa_pss_pss_*), which TLS 1.3 accepts.
    SignatureScheme::Unknown(0x0809),
    SignatureScheme::Unknown(0x080a),
    SignatureScheme::Unknown(0x080b),
    // Brainpool curves of TLS 1.3.
    SignatureScheme::Unknown(0x081a),
    SignatureScheme::Unknown(0x081b),
    SignatureScheme::Unknown(0x081c),
    // ML-DSA.
    SignatureScheme::Unknown(0x0904),
    SignatureScheme::Unknown(0x0905),
    SignatureScheme::Unknown(0x0906),
    // SHA-1.
    SignatureScheme::ECDSA_SHA1_Legacy,
    SignatureScheme::RSA_PKCS1_SHA1,
];

/// Accepts any certificate. A check without a CA determines whether a server answers, and not which
/// server. The signature of the handshake proves only that the server has the certificate's key.
/// Without a known certificate, this is no evidence, so the signature is not verified: the
/// certificate need not be parsed, and its algorithm need not be supported.
#[derive(Debug)]
struct AnyCertificate;

impl ServerCertVerifier for AnyCertificate {
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
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        SCHEMES.to_vec()
    }
}

#[cfg(test)]
mod tests {
    use rustls::server::{ClientHello, ResolvesServerCert};
    use rustls::sign::{CertifiedKey, Signer, SigningKey};
    use rustls::version::{TLS12, TLS13};
    use rustls::{ServerConfig, SignatureAlgorithm, SupportedProtocolVersion};
    use tokio::io::AsyncWriteExt;

    use super::*;

    /// A signing key with invalid signatures and an invalid certificate.
    #[derive(Clone, Debug)]
    struct Junk(SignatureScheme, SignatureAlgorithm);

    impl SigningKey for Junk {
        fn choose_scheme(&self, offered: &[SignatureScheme]) -> Option<Box<dyn Signer>> {
            let signer: Box<dyn Signer> = Box::new(self.clone());
            offered.contains(&self.0).then_some(signer)
        }

        fn algorithm(&self) -> SignatureAlgorithm {
            self.1
        }
    }

    impl Signer for Junk {
        fn sign(&self, _: &[u8]) -> Result<Vec<u8>, rustls::Error> {
            Ok(vec![7; 64])
        }

        fn scheme(&self) -> SignatureScheme {
            self.0
        }
    }

    impl ResolvesServerCert for Junk {
        fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
            let certificate = CertificateDer::from(b"no DER".to_vec());
            let key = Arc::new(self.clone());
            Some(Arc::new(CertifiedKey::new(vec![certificate], key)))
        }
    }

    /// Returns the result of a check without `ca` of a server that uses `key`.
    async fn met(key: Junk, version: &'static SupportedProtocolVersion) -> Result<(), ProbeError> {
        let provider = lenient(&provider().expect("this build has a TLS provider"));
        let config = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[version])
            .expect("the TLS version is supported")
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(key));
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let (client, server) = tokio::io::duplex(1 << 16);
        let serves = tokio::spawn(async move {
            if let Ok(mut stream) = acceptor.accept(server).await {
                let _ = stream.write_all(b"x").await;
            }
        });
        let address = ([192, 0, 2, 1], 443).into();
        let tls = Tls::plain().expect("this build has TLS");
        let result = tls.meet(client, address).await.map(drop);
        serves.await.expect("the server thread ends");
        result
    }

    #[tokio::test]
    async fn tls_probe_without_ca_accepts_any_certificate_with_any_signature_scheme() {
        use SignatureAlgorithm::{ECDSA, ED448, ED25519, RSA};
        use SignatureScheme as Scheme;
        for (scheme, algorithm, versions) in [
            (Scheme::ECDSA_NISTP256_SHA256, ECDSA, &[&TLS12, &TLS13][..]),
            (Scheme::ECDSA_NISTP384_SHA384, ECDSA, &[&TLS12, &TLS13]),
            (Scheme::ECDSA_NISTP521_SHA512, ECDSA, &[&TLS12, &TLS13]),
            (Scheme::ED25519, ED25519, &[&TLS12, &TLS13]),
            (Scheme::ED448, ED448, &[&TLS12, &TLS13]),
            (Scheme::RSA_PSS_SHA256, RSA, &[&TLS12, &TLS13]),
            (Scheme::RSA_PSS_SHA512, RSA, &[&TLS12, &TLS13]),
            (Scheme::RSA_PKCS1_SHA256, RSA, &[&TLS12]),
            (Scheme::RSA_PKCS1_SHA1, RSA, &[&TLS12]),
        ] {
            for version in versions {
                let result = met(Junk(scheme, algorithm), version).await;
                assert_eq!(result, Ok(()), "{scheme:?} {version:?}");
            }
        }
    }

    #[test]
    fn tls_lenient_provider_has_the_cipher_suites_of_the_strict_provider() {
        let provider = provider().expect("this build has a TLS provider");
        let ours = provider.cipher_suites.iter();
        let lenient = lenient(&provider);
        let theirs: Vec<_> = lenient
            .cipher_suites
            .iter()
            .map(SupportedCipherSuite::suite)
            .collect();
        for suite in ours {
            assert!(theirs.contains(&suite.suite()), "{suite:?}");
        }
        assert_eq!(theirs.len(), provider.cipher_suites.len());
    }
}

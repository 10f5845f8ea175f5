//! Requests to etcd's JSON gateway, and its answers. Bytes are base64, and 64-bit numbers are
//! strings.

use std::fmt;

use serde::de::{self, DeserializeOwned, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::sources::base64::{decode, encode};

/// Bytes of a key or a value.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct Bytes(pub(super) Vec<u8>);

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(&self.0))
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&encode(&self.0))
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Bytes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("base64")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Bytes, E> {
                let bytes = decode(text);
                bytes
                    .map(Bytes)
                    .ok_or_else(|| E::custom("a value is not base64"))
            }
        }
        deserializer.deserialize_str(V)
    }
}

/// A number, which JSON contains as a string or as a number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Number(pub(super) i64);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_string())
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = Number;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Number, E> {
                // Cluster and member ids use all 64 bits.
                let signed = text.parse::<i64>().ok();
                let number = signed.or_else(|| text.parse::<u64>().ok().map(u64::cast_signed));
                number
                    .map(Number)
                    .ok_or_else(|| E::custom("a value is not a number of 64 bits"))
            }

            fn visit_i64<E: de::Error>(self, number: i64) -> Result<Number, E> {
                Ok(Number(number))
            }

            fn visit_u64<E: de::Error>(self, number: u64) -> Result<Number, E> {
                Ok(Number(number.cast_signed()))
            }
        }
        deserializer.deserialize_any(V)
    }
}

/// Header of every answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Header {
    pub(super) cluster_id: Number,
    pub(super) revision: Number,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct KeyValue {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    pub(super) mod_revision: Number,
    /// The lease at whose end etcd deletes the key; 0 for none.
    pub(super) lease: Number,
}

#[derive(Debug, Serialize)]
pub(super) struct Login<'a> {
    pub(super) name: &'a str,
    pub(super) password: &'a str,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Token {
    pub(super) token: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Range {
    pub(super) key: Bytes,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) range_end: Option<Bytes>,
    pub(super) limit: Number,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) revision: Option<Number>,
    pub(super) keys_only: bool,
    /// Selects keys that changed at this revision or later. The count in the answer still includes
    /// all keys.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) min_mod_revision: Option<Number>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Ranged {
    pub(super) header: Header,
    pub(super) kvs: Vec<KeyValue>,
    pub(super) more: bool,
    pub(super) count: Number,
}

#[derive(Debug, Serialize)]
pub(super) struct Put {
    pub(super) key: Bytes,
    pub(super) value: Bytes,
    pub(super) lease: Number,
}

/// An answer whose fields are not used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Done {}

#[derive(Debug, Serialize)]
pub(super) struct Grant {
    #[serde(rename = "TTL")]
    pub(super) ttl: Number,
}

/// A request to renew or revoke a lease.
#[derive(Debug, Serialize)]
pub(super) struct Lease {
    #[serde(rename = "ID")]
    pub(super) id: Number,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Granted {
    #[serde(rename = "ID")]
    pub(super) id: Number,
    #[serde(rename = "TTL")]
    pub(super) ttl: Number,
    pub(super) error: String,
}

/// A message of a stream, as the gateway wraps it.
#[derive(Debug, Deserialize)]
pub(super) struct Streamed<T> {
    pub(super) result: Option<T>,
    pub(super) error: Option<Wrong>,
}

#[derive(Debug, Serialize)]
pub(super) struct Watch {
    pub(super) create_request: Create,
}

#[derive(Debug, Serialize)]
pub(super) struct Create {
    pub(super) key: Bytes,
    pub(super) range_end: Bytes,
    pub(super) start_revision: Number,
    /// Permits etcd to split a long answer into several messages.
    pub(super) fragment: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Watched {
    pub(super) canceled: bool,
    pub(super) cancel_reason: String,
    pub(super) compact_revision: Number,
    pub(super) events: Vec<Event>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Event {
    /// `DELETE`; empty for a stored key.
    #[serde(rename = "type")]
    pub(super) kind: String,
    pub(super) kv: KeyValue,
}

/// An error of etcd. In streams, it is nested, and its fields have other names.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Wrong {
    #[serde(alias = "grpc_code")]
    pub(super) code: u32,
    #[serde(alias = "error")]
    pub(super) message: String,
}

/// Parses an answer.
///
/// # Errors
/// `text` is not a valid answer; the error contains the reason.
pub(super) fn read<T: DeserializeOwned>(text: &[u8]) -> Result<T, String> {
    serde_json::from_slice(text).map_err(|error| format!("etcd sent an invalid answer ({error})"))
}

/// Parses an error of etcd; `None` if `text` has another form.
pub(super) fn wrong(text: &[u8]) -> Option<Wrong> {
    // In answers, `error` and `message` contain the same text.
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Both {
        error: String,
        message: String,
        code: u32,
    }
    let both: Both = serde_json::from_slice(text).ok()?;
    let message = if both.message.is_empty() {
        both.error
    } else {
        both.message
    };
    Some(Wrong {
        code: both.code,
        message,
    })
}

/// Returns the end of the range of keys with the prefix `prefix`: the prefix with its last byte
/// incremented, after trailing bytes of 255 are removed. If no byte remains, the range contains all
/// keys.
pub(super) fn end_of(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    // The range of all keys.
    vec![0]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn etcd_gateway_answers_are_parsed_and_put_request_is_encoded() {
        let ranged: Ranged = read(
            br#"{"header":{"cluster_id":"14841639068965178418","member_id":"1","revision":"7","raft_term":"2"},
                "kvs":[{"key":"L2E=","create_revision":"2","mod_revision":"5","version":"1","value":"eA=="}],"count":"1"}"#,
        )
        .unwrap();
        assert_eq!(ranged.header.revision, Number(7));
        assert_eq!(ranged.kvs[0].key.0, b"/a");
        assert_eq!(
            (ranged.kvs[0].mod_revision, ranged.more),
            (Number(5), false)
        );
        let watched: Streamed<Watched> = read(
            br#"{"result":{"header":{"revision":"9"},"canceled":true,"compact_revision":"8"}}"#,
        )
        .unwrap();
        let watched = watched.result.unwrap();
        assert!(watched.canceled && watched.compact_revision == Number(8));
        // The field is absent if the lease has expired.
        let kept: Streamed<Granted> =
            read(br#"{"result":{"header":{"revision":"9"},"ID":"7587"}}"#).unwrap();
        assert_eq!(kept.result.unwrap().ttl, Number(0));
        let refused = wrong(
            br#"{"error":"etcdserver: invalid auth token","message":"etcdserver: invalid auth token","code":16}"#,
        );
        assert_eq!(refused.unwrap().code, 16);
        let refused: Streamed<Watched> = read(
            br#"{"error":{"grpc_code":7,"http_code":403,"message":"etcdserver: permission denied","http_status":"Forbidden"}}"#,
        )
        .unwrap();
        assert_eq!(refused.error.unwrap().code, 7);
        let put = Put {
            key: Bytes(b"/a".to_vec()),
            value: Bytes(b"x".to_vec()),
            lease: Number(3),
        };
        assert_eq!(
            serde_json::to_string(&put).unwrap(),
            r#"{"key":"L2E=","value":"eA==","lease":"3"}"#
        );
    }

    #[test]
    fn etcd_prefix_range_ends_after_last_key_with_prefix() {
        assert_eq!(end_of(b"/lvs/"), b"/lvs0");
        assert_eq!(end_of(b"a\xff"), b"b");
        assert_eq!(end_of(b"\xff"), [0]);
    }

    proptest! {
        #[test]
        fn etcd_parser_does_not_panic_on_damaged_answers(at in 0_usize..150, byte: u8) {
            let mut text = br#"{"result":{"header":{"revision":"9"},"events":[{"type":"DELETE","kv":{"key":"L2E=","mod_revision":"9"}},{"kv":{"key":"L2I=","value":"eA=="}}]}}"#.to_vec();
            let at = at % text.len();
            text[at] = byte;
            let _ = read::<Streamed<Watched>>(&text);
            let _ = read::<Ranged>(&text);
            let _ = wrong(&text);
        }
    }
}

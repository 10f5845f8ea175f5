//! A TOML value with the positions of all its parts, for tables whose keys depend on a kind.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, MapAccess, SeqAccess, Visitor};
use toml::Spanned;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    /// `"..."`
    String(String),
    /// A whole number, limited to the range of `i64`.
    Integer(i64),
    /// A number with a fraction.
    Float(f64),
    /// `true`, `false`
    Boolean(bool),
    /// `[...]`
    Array(Vec<Spanned<Self>>),
    /// `{...}`
    Table(Vec<(Spanned<String>, Spanned<Self>)>),
}

impl Value {
    /// A description of the value for messages.
    pub(crate) fn describe(&self) -> String {
        match self {
            Self::String(text) => format!("the string {text:?}"),
            Self::Integer(number) => format!("the number `{number}`"),
            Self::Float(number) => format!("the number `{number}`"),
            Self::Boolean(word) => format!("the word `{word}`"),
            Self::Array(_) => "an array".to_owned(),
            Self::Table(_) => "a table".to_owned(),
        }
    }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: de::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Value;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a value")
            }

            fn visit_str<E: de::Error>(self, v: &str) -> Result<Value, E> {
                Ok(Value::String(v.to_owned()))
            }

            fn visit_bool<E: de::Error>(self, v: bool) -> Result<Value, E> {
                Ok(Value::Boolean(v))
            }

            fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
                Ok(Value::Float(v))
            }

            fn visit_i64<E: de::Error>(self, v: i64) -> Result<Value, E> {
                Ok(Value::Integer(v))
            }

            fn visit_u64<E: de::Error>(self, v: u64) -> Result<Value, E> {
                Ok(Value::Integer(i64::try_from(v).unwrap_or(i64::MAX)))
            }

            fn visit_i128<E: de::Error>(self, v: i128) -> Result<Value, E> {
                Ok(Value::Integer(if v < 0 { i64::MIN } else { i64::MAX }))
            }

            fn visit_u128<E: de::Error>(self, _: u128) -> Result<Value, E> {
                Ok(Value::Integer(i64::MAX))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
                let mut all = Vec::new();
                while let Some(item) = seq.next_element()? {
                    all.push(item);
                }
                Ok(Value::Array(all))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
                let mut all = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    all.push(entry);
                }
                Ok(Value::Table(all))
            }
        }
        deserializer.deserialize_any(V)
    }
}

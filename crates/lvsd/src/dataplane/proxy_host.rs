//! Implements [`Host`] and [`DataplaneControl`] for the proxy.

use std::collections::HashMap;
use std::time::Duration;

use lvs_core::api::{Call, Done, ServiceId, ServiceInfo};
use lvs_core::filter::FilterLists;
use lvs_proxy::Proxy;

use super::control::{ControlError, DataplaneControl};
use super::{ConnectError, Given, Host};
use crate::config::Dataplane;
use crate::host_addresses::Addresses;

/// The proxy, which lvsd configures like a dataplane.
#[derive(Clone, Debug)]
pub(super) struct ProxyHost(pub(super) Proxy);

impl Host for ProxyHost {
    fn connect(&mut self, _: Duration) -> Result<Box<dyn DataplaneControl>, ConnectError> {
        Ok(Box::new(self.clone()))
    }

    fn is_proxy(&self) -> bool {
        true
    }

    fn start(&mut self, _: &Dataplane) -> Result<(), String> {
        Ok(())
    }

    fn ended(&mut self) -> Option<String> {
        None
    }

    fn kill(&mut self) {}

    fn end(&mut self, _: u32) -> Result<(), String> {
        Ok(())
    }

    fn alive(&mut self, _: u32) -> bool {
        true
    }

    fn started_by_us(&self, _: u32) -> bool {
        false
    }

    fn identity(&self, _: u32) -> String {
        "proxy".to_owned()
    }

    fn remember(&mut self, _: &Given) {}

    fn recall(&self) -> Given {
        Given::default()
    }

    fn addresses(&self) -> Addresses {
        Addresses::default()
    }
}

impl DataplaneControl for ProxyHost {
    fn services(&mut self) -> Result<Vec<ServiceInfo>, ControlError> {
        Ok(self.0.services())
    }

    fn filters(&mut self) -> Result<HashMap<Option<ServiceId>, FilterLists>, ControlError> {
        Ok(self.0.filters())
    }

    fn apply(&mut self, changes: &[Call]) -> Result<Done, ControlError> {
        self.0
            .apply(changes)
            .map(|()| Done::default())
            .map_err(ControlError::Refused)
    }
}

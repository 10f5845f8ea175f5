//! The available schedulers, by name.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;
use core::fmt;

use crate::Scheduler;
use crate::sched::BUILT_IN;

type Factory = Arc<dyn Fn() -> Box<dyn Scheduler> + Send + Sync>;

/// The available schedulers, by name. Services refer to a scheduler by its name.
#[derive(Clone)]
pub struct Registry {
    factories: BTreeMap<&'static str, Factory>,
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.names()).finish()
    }
}

impl Registry {
    /// A registry of the [built-in](BUILT_IN) schedulers.
    pub fn new() -> Self {
        let mut registry = Self {
            factories: BTreeMap::new(),
        };
        for about in BUILT_IN {
            registry.register(about.name, about.make);
        }
        registry
    }

    /// Adds or replaces a scheduler; `factory` makes one for each service that uses it.
    pub fn register(
        &mut self,
        name: &'static str,
        factory: impl Fn() -> Box<dyn Scheduler> + Send + Sync + 'static,
    ) {
        self.factories.insert(name, Arc::new(factory));
    }

    /// Unregisters a scheduler: [`create`](Self::create) no longer finds it.
    pub fn remove(&mut self, name: &str) {
        self.factories.remove(name);
    }

    /// A new scheduler with this name; `None` if no scheduler has the name.
    pub fn create(&self, name: &str) -> Option<Box<dyn Scheduler>> {
        self.factories.get(name).map(|factory| factory())
    }

    /// The names of all schedulers of the registry, sorted.
    pub fn names(&self) -> impl Iterator<Item = &'static str> + '_ {
        self.factories.keys().copied()
    }
}

impl Default for Registry {
    fn default() -> Self {
        Self::new()
    }
}

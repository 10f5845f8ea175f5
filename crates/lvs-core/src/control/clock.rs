//! Periodic work of the control half.

use super::Control;
use super::defense::{self, Defense};
use super::templates::TEMPLATES_AT_ONCE;
use crate::Instant;
use crate::conn::tick_of;
use crate::shard::Shard;

impl Control {
    /// Runs the work that is due: it removes expired templates, takes snapshots of the counters,
    /// frees the records of removed servers, runs the periodic work of schedulers and slow starts,
    /// and updates the defences. One call processes a limited number of templates and of snapshots.
    /// Call it at least every two seconds, after the shards' [`advance`](crate::Shard::advance): a
    /// template ends after its last connection.
    pub fn advance(&mut self, now: Instant) {
        self.show_clock(now);
        let mut budget = TEMPLATES_AT_ONCE;
        while let Some(at) = self.next_event.filter(|&at| at <= now) {
            self.expire_templates(at, &mut budget);
            self.run_events(at);
            if self.estimator.is_in_a_round() {
                // The snapshots of many servers take several calls, however late this call is.
                return;
            }
        }
        self.expire_templates(now, &mut budget);
    }

    /// As [`advance`](Self::advance), for a director of one shard: connections, templates and all
    /// other timers end in the order of their deadlines, however far the clock has advanced. If the
    /// shard belongs to another director, it is unchanged, and only `advance` runs.
    pub fn advance_with(&mut self, shard: &mut Shard, now: Instant) {
        if !self.owns(shard) {
            return self.advance(now);
        }
        if self.clock.is_some_and(|clock| clock < now) {
            shard.reap();
        }
        self.sweep(shard);
        self.show_clock(now);
        self.count_drops(&mut shard.drops, now);
        while let Some(at) = self.next_event.filter(|&at| at <= now) {
            self.expire_until(shard, at);
            self.run_events(at);
            self.sweep(shard);
        }
        self.expire_until(shard, now);
    }

    /// Removes expired connections and templates in the order of their deadlines; within a tick
    /// (about 4 ms), connections before templates.
    fn expire_until(&mut self, shard: &mut Shard, limit: Instant) {
        let mut budget = usize::MAX;
        let (mut connections, mut templates) = (true, true);
        loop {
            let conn_tick = if connections {
                shard.due_tick(limit, &mut budget)
            } else {
                None
            };
            let template_tick = if templates {
                self.templates.table.due_tick(limit, &mut budget)
            } else {
                None
            };
            let (tick, of_connections) = match (conn_tick, template_tick) {
                (None, None) => return,
                (Some(conn), None) => (conn, true),
                (None, Some(template)) => (template, false),
                (Some(conn), Some(template)) => (conn.min(template), conn <= template),
            };
            let (any, more) = if of_connections {
                (shard.expire_due(limit, &mut budget), &mut connections)
            } else {
                let any = self.expire_due_templates(shard, limit, &mut budget);
                (any, &mut templates)
            };
            // The remaining work of the last tick is due later.
            *more = any || tick != tick_of(limit);
        }
    }

    /// The time at which [`advance`](Self::advance) must be called next; `None` if no work is
    /// planned, as before the first call of `advance`.
    pub fn next_wakeup(&self) -> Option<Instant> {
        let templates = self.templates.table.next_wakeup();
        self.next_event.into_iter().chain(templates).min()
    }

    /// Advances the clock to `now`; it never goes back. At the first call, starts the periodic work
    /// from `now`.
    pub(crate) fn show_clock(&mut self, now: Instant) {
        if self.clock.is_none() {
            self.estimator.start(now);
            if Defense::is_needed(&self.settings.sysctls) {
                self.next_defense = Some(now + defense::PERIOD);
            }
            for (&number, service) in &mut self.services {
                service.next_tick = service.pool.period().map(|period| now + period);
                let moments = [service.next_tick, service.slow.next];
                self.agenda.set(number, moments.into_iter().flatten().min());
            }
            self.plan();
        }
        self.clock = self.clock.max(Some(now));
    }

    /// Runs the work that is due at `at`, the time of the next event.
    pub(crate) fn run_events(&mut self, at: Instant) {
        let due = |event: Option<Instant>| event.is_some_and(|event| event <= at);
        if due(self.next_defense) {
            self.update_defense();
            self.next_defense =
                Defense::is_needed(&self.settings.sysctls).then_some(at + defense::PERIOD);
            if self.defense.drops_entries {
                self.sweep_work
                    .iter_mut()
                    .for_each(|work| work.drop_entry += 1);
                self.drop_templates(at);
                self.changed();
            }
        }
        self.estimate(at);
        for number in self.agenda.due(at) {
            let Some(service) = self.services.get_mut(&number) else {
                continue;
            };
            if due(service.next_tick) {
                service.pool.tick(at);
                service.next_tick = service.pool.period().map(|period| at + period);
            }
            if due(service.slow.next) {
                service.apply_slow_start(at);
            }
            self.plan_service(number);
        }
        if due(self.next_trash) {
            self.empty_trash(at);
        }
        self.plan();
    }

    /// Enters the time of the next work for a service into the agenda.
    pub(crate) fn plan_service(&mut self, number: u32) {
        let service = self.services.get(&number);
        let moments = service.map(|service| [service.next_tick, service.slow.next]);
        let next = moments.into_iter().flatten().flatten().min();
        self.agenda.set(number, next);
        self.plan();
    }

    /// Computes the time of the next event.
    pub(super) fn plan(&mut self) {
        let periods = [self.estimator.wakeup(), self.next_trash, self.next_defense];
        let moments = periods.into_iter().chain([self.agenda.next()]);
        self.next_event = moments.flatten().min();
    }
}

//! `lvsadm filter`: the filters for new connections, by source.

use std::collections::{BTreeMap, BTreeSet};

use lvs_core::api::{Call, Done, FilterItem, FilterSpec, ServiceId};
use lvs_core::filter::{FilterLists, SourceFilter, parse_prefixes};
use lvs_core::{Prefix, ServiceKey};

use lvs_api::Error;

use super::{Outcome, Trouble, Words, change, connect, service_named, service_text, service_words};
use crate::invocation::Invocation;
use crate::session::{json_list, warn};

pub(super) fn run(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    let free: Vec<&str> = words.free.iter().map(String::as_str).collect();
    let (word, scope) = match free[..] {
        ["list"] | [] => return list(run, None),
        ["list", scope] => {
            let scope = scope_named(run, scope)?;
            return list(run, Some(scope));
        }
        ["save"] => return save(run),
        ["restore"] => return restore(run),
        [word @ ("add" | "del" | "set" | "off"), scope] => (word, scope_named(run, scope)?),
        _ => {
            return Err(Trouble::Usage(
                "expected list [SERVICE], save, restore, or add, del, set or off and a SERVICE or all"
                    .into(),
            ));
        }
    };
    let given = given(words)?;
    let nothing = given == FilterLists::default();
    if nothing == (word != "off") {
        let text = if nothing { "needs" } else { "takes no" };
        return Err(Trouble::Usage(format!(
            "{word} {text} --allow, --deny, --allow-file or --deny-file"
        )));
    }
    let mut client = connect(run)?;
    let items: Vec<FilterItem> = client.collect(&Call::FilterList {})?;
    let before = together(items).remove(&order(scope)).unwrap_or_default().1;
    let lists = match word {
        "add" => added(before, given),
        "del" => removed(before, &given)?,
        _ => given,
    };
    let filter = SourceFilter::new(lists).map_err(Trouble::Usage)?;
    let spec = FilterSpec {
        service: scope,
        filter,
    };
    change(run, &mut client, &Call::FilterSet(spec))?;
    Ok(0)
}

/// Parses the name of a service, or `all`, for which the result is `None`.
fn scope_named(run: &Invocation<'_>, word: &str) -> Result<Option<ServiceId>, Trouble> {
    Ok(match word {
        "all" => None,
        word => Some(service_named(run, word)?),
    })
}

/// The prefixes on the command line, and in the files that it names.
fn given(words: &Words) -> Result<FilterLists, Trouble> {
    let read = |flag: &str, file_flag: &str| {
        let mut all: Vec<Prefix> = Vec::new();
        for word in words
            .value(flag)
            .unwrap_or("")
            .split(',')
            .filter(|word| !word.is_empty())
        {
            all.push(word.parse().map_err(Trouble::Usage)?);
        }
        if let Some(path) = words.value(file_flag) {
            let text = std::fs::read_to_string(path)
                .map_err(|error| Trouble::Usage(format!("cannot read {path}: {error}")))?;
            all.extend(parse_prefixes(&text).map_err(|(line, error)| {
                Trouble::Usage(format!("{path}, line {line}: {error}"))
            })?);
        }
        Ok::<_, Trouble>(all)
    };
    Ok(FilterLists {
        allow: read("--allow", "--allow-file")?,
        deny: read("--deny", "--deny-file")?,
    })
}

/// Adds the prefixes of `more` to `before`. A prefix that is added to one list is removed from the
/// other.
fn added(mut before: FilterLists, more: FilterLists) -> FilterLists {
    let (allow, deny) = (set(&more.allow), set(&more.deny));
    before.allow.retain(|prefix| !deny.contains(prefix));
    before.deny.retain(|prefix| !allow.contains(prefix));
    before.allow.extend(more.allow);
    before.deny.extend(more.deny);
    before
}

fn removed(mut before: FilterLists, less: &FilterLists) -> Result<FilterLists, Trouble> {
    for (list, less, word) in [
        (&mut before.allow, &less.allow, "allowed"),
        (&mut before.deny, &less.deny, "denied"),
    ] {
        let (there, less) = (set(list), set(less));
        if let Some(stranger) = less.difference(&there).next() {
            return Err(Trouble::Usage(format!(
                "{stranger} is not in the list of {word} prefixes; lvsadm filter list shows the list"
            )));
        }
        list.retain(|prefix| !less.contains(prefix));
    }
    Ok(before)
}

fn set(prefixes: &[Prefix]) -> BTreeSet<Prefix> {
    prefixes.iter().copied().collect()
}

/// Filters by the name of their service; the name is empty for the filter of all services.
type Filters = BTreeMap<String, (Option<ServiceId>, FilterLists)>;

fn order(service: Option<ServiceId>) -> String {
    service.map_or_else(String::new, |service| ServiceKey::from(service).to_string())
}

fn together(items: Vec<FilterItem>) -> Filters {
    let mut all = Filters::new();
    for FilterItem { service, lists } in items {
        let (_, whole) = all
            .entry(order(service))
            .or_insert_with(|| (service, FilterLists::default()));
        whole.allow.extend(lists.allow);
        whole.deny.extend(lists.deny);
    }
    all
}

fn list(run: &mut Invocation<'_>, only: Option<Option<ServiceId>>) -> Outcome {
    let items: Vec<FilterItem> = connect(run)?.collect(&Call::FilterList {})?;
    let mut filters = together(items);
    filters.retain(|_, (service, _)| only.is_none_or(|only| only == *service));
    if run.json {
        let filters = filters.into_values();
        let filters: Vec<_> = filters
            .map(|(service, lists)| FilterItem { service, lists })
            .collect();
        json_list(run, &filters)?;
        return Ok(0);
    }
    if filters.is_empty() {
        writeln!(run.output, "no filters")?;
    }
    for (service, lists) in filters.into_values() {
        let name = service.map_or_else(|| "all".to_owned(), service_text);
        writeln!(run.output, "{name}:")?;
        for (word, list) in [("allow", lists.allow), ("deny", lists.deny)] {
            for prefix in list {
                writeln!(run.output, "  {word:<5} {prefix}")?;
            }
        }
    }
    Ok(0)
}

/// Prints all filters as [`restore`] reads them: a line for each prefix, `SERVICE allow|deny
/// PREFIX`.
fn save(run: &mut Invocation<'_>) -> Outcome {
    let items: Vec<FilterItem> = connect(run)?.collect(&Call::FilterList {})?;
    writeln!(
        run.output,
        "# {} filter(s) by source; `lvsadm filter restore` replaces all filters by its input",
        together(items.clone()).len()
    )?;
    for (service, lists) in together(items).into_values() {
        let name = service.map_or_else(|| "all".to_owned(), service_words);
        for (word, list) in [("allow", lists.allow), ("deny", lists.deny)] {
            for prefix in list {
                writeln!(run.output, "{name} {word} {prefix}")?;
            }
        }
    }
    writeln!(run.output, "{END}")?;
    Ok(0)
}

/// The last line of saved filters. Without it, no filter is restored: a pipe from a failed program
/// has empty or truncated output, which would remove the missing filters.
const END: &str = "# end of filters";

/// Checks that the input is complete: its last line must be [`END`].
fn whole(text: &str) -> Result<(), Trouble> {
    let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
    if last == Some(END) {
        return Ok(());
    }
    let what = match last {
        None => "the input is empty",
        Some(_) => "the input does not end with that line",
    };
    Err(Trouble::Dataplane(format!(
        "`lvsadm filter save` ends with the line `{END}`, and {what}; nothing was changed; check whether the program that writes the input has failed, and add that line to a file that you have written"
    )))
}

/// Replaces all filters by those of the standard input, completely or not at all.
fn restore(run: &mut Invocation<'_>) -> Outcome {
    let mut text = String::new();
    run.input.read_to_string(&mut text)?;
    whole(&text)?;
    let wanted = read(run, &text)?;
    let mut client = connect(run)?;
    let items: Vec<FilterItem> = client.collect(&Call::FilterList {})?;
    let mut changes = Vec::new();
    // The line number of each change.
    let mut lines = Vec::new();
    for (service, _) in together(items).into_values() {
        if !wanted.contains_key(&order(service)) {
            changes.push(Call::FilterSet(FilterSpec {
                service,
                filter: SourceFilter::default(),
            }));
            lines.push(None);
        }
    }
    for Wanted {
        line,
        service,
        lists,
    } in wanted.into_values()
    {
        let filter = SourceFilter::new(lists).map_err(|error| at(line, &error))?;
        changes.push(Call::FilterSet(FilterSpec { service, filter }));
        lines.push(Some(line));
    }
    match client.call::<Done>(&Call::Apply { changes }) {
        Ok(done) => {
            warn(run, &done)?;
            Ok(0)
        }
        Err(Error::Refused(failure)) => {
            let line = failure.change.and_then(|change| *lines.get(change)?);
            let place = line.map_or_else(String::new, |line| format!("line {line}: "));
            let message = failure.message.trim_end();
            Err(Trouble::Dataplane(format!(
                "{place}{message}; nothing was changed"
            )))
        }
        // Without an answer, the changes may have been made or not.
        Err(error) => Err(Trouble::Dataplane(format!(
            "{error}; `lvsadm filter list` shows whether the filters were replaced"
        ))),
    }
}

/// A filter that [`restore`] has read.
struct Wanted {
    /// The number of the first line with this filter, from 1.
    line: usize,
    service: Option<ServiceId>,
    lists: FilterLists,
}

fn at(line: usize, error: &str) -> Trouble {
    Trouble::Dataplane(format!("line {line}: {error}; nothing was changed"))
}

/// Parses the output of [`save`]. The keys of the result are the names of services; the name is
/// empty for the filter of all services.
fn read(run: &Invocation<'_>, text: &str) -> Result<BTreeMap<String, Wanted>, Trouble> {
    let mut all = BTreeMap::new();
    let mut named: Option<(&str, Option<ServiceId>)> = None;
    for (line, words) in (1..).zip(text.lines()) {
        let words: Vec<&str> = words
            .split('#')
            .next()
            .unwrap_or("")
            .split_whitespace()
            .collect();
        let (name, word, prefix) = match words[..] {
            [] => continue,
            [name, word @ ("allow" | "deny"), prefix] => (name, word, prefix),
            _ => return Err(at(line, "expected SERVICE|all allow|deny PREFIX")),
        };
        let service = match named {
            Some((before, service)) if before == name => service,
            _ => scope_named(run, name).map_err(|trouble| at(line, &trouble.text()))?,
        };
        named = Some((name, service));
        let prefix: Prefix = prefix.parse().map_err(|error: String| at(line, &error))?;
        let wanted = all.entry(order(service)).or_insert_with(|| Wanted {
            line,
            service,
            lists: FilterLists::default(),
        });
        if word == "allow" {
            wanted.lists.allow.push(prefix);
        } else {
            wanted.lists.deny.push(prefix);
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(allow: &str, deny: &str) -> FilterLists {
        FilterLists {
            allow: parse_prefixes(allow).unwrap(),
            deny: parse_prefixes(deny).unwrap(),
        }
    }

    #[test]
    fn truncated_filter_file_is_refused() {
        for text in [
            "",
            "\n",
            "all deny 10.0.0.0/8\n",
            "# end of filters\nall deny 10.0.0.0/8\n",
            "all deny 10.0.0.0/8\n# end of fil",
        ] {
            assert!(whole(text).is_err(), "{text:?}");
        }
        for text in [
            "# end of filters",
            "all deny 10.0.0.0/8\r\n# end of filters\r\n\r\n",
        ] {
            assert!(whole(text).is_ok(), "{text:?}");
        }
    }

    #[test]
    fn filter_add_moves_prefix_between_lists_and_del_refuses_absent_prefix() {
        let before = lists("10.0.0.0/8", "10.1.0.0/16");
        let more = added(before.clone(), lists("10.1.0.0/16", "::1"));
        assert_eq!(more, lists("10.0.0.0/8 10.1.0.0/16", "::1"));
        let less = removed(more, &lists("10.1.0.0/16", "")).unwrap();
        assert_eq!(less, lists("10.0.0.0/8", "::1"));
        assert!(removed(before, &lists("10.1.0.0/16", "")).is_err());
    }
}

//! The one table of the additional commands.

use super::{
    Operator, capture, doctor, drain, explain, filter, flag, limit, local, mark, shell, simple,
    watch,
};

/// Dispatch, help, completions and manual page go by it.
pub(crate) const OPERATORS: &[Operator] = &[
    Operator {
        name: "watch",
        arguments: "",
        summary: "show services and servers with rates, refreshed at an interval",
        text: "Rates are per second, since the previous refresh. In a terminal, q or Ctrl-C quits, and s changes the sort order.",
        flags: &[
            flag("--interval", "SECONDS", "refresh interval (default: 1)"),
            flag("--count", "N", "exit after N refreshes"),
            flag(
                "--sort",
                "rate|bytes|active|name",
                "sort order (default: rate)",
            ),
            flag("--no-color", "", "no colours, as with NO_COLOR"),
        ],
        run: watch::run,
    },
    Operator {
        name: "explain",
        arguments: "tcp|udp|sctp SRC:PORT VIP:PORT",
        summary: "show what would happen to a new packet, and why",
        text: "Shows the firewall mark, the service, the connection or persistence template that decides, the slot in the scheduler's hash table, every server and why it can or cannot be chosen, and the one that would be. Nothing is changed.",
        flags: &[
            flag(
                "--mark",
                "N",
                "assume this firewall mark, whatever the mark rules say",
            ),
            flag(
                "--interface",
                "NAME",
                "assume this incoming interface, for mark rules that match on one",
            ),
        ],
        run: explain::run,
    },
    Operator {
        name: "drain",
        arguments: "SERVICE SERVER",
        summary: "take a server out of service without breaking connections",
        text: "Sets the weight to 0, waits until the last connection has ended, and shows how many are left. SERVICE is VIP:PORT (TCP), tcp:VIP:PORT, udp:VIP:PORT, sctp:VIP:PORT or fwmark:N. When interrupted, or when the deadline passes without --undo, the server keeps weight 0.",
        flags: &[
            flag(
                "--deadline",
                "TIME",
                "give up after 90, 90s, 10m or 1h, with exit status 1",
            ),
            flag(
                "--active",
                "",
                "do not wait for closing connections (InActConn)",
            ),
            flag("--delete", "", "delete the server when it is drained"),
            flag("--undo", "", "restore the weight when the deadline passes"),
        ],
        run: drain::run,
    },
    Operator {
        name: "drops",
        arguments: "",
        summary: "show packets that were dropped or left to the host, by reason",
        text: "Each reason comes with its count and what to do about it.",
        flags: &[flag("--all", "", "include reasons that have not occurred")],
        run: simple::drops,
    },
    Operator {
        name: "sysctl",
        arguments: "[NAME[=VALUE]]",
        summary: "read or write the settings that the kernel has under net.ipv4.vs",
        text: "Without NAME, all of them are shown.",
        flags: &[],
        run: simple::sysctl,
    },
    Operator {
        name: "mark",
        arguments: "list | add | del N",
        summary: "manage the rules that set firewall marks",
        text: "The first rule that matches a packet decides. A service with that mark (-f) then takes it, so that one service can have several ports or addresses.",
        flags: &[
            flag(
                "--destination",
                "NETWORK",
                "destination address or network (by default all services, with --source and --drop or --host)",
            ),
            flag("--source", "NETWORK", "source address or network"),
            flag("--interface", "NAME", "incoming interface"),
            flag(
                "--protocol",
                "tcp|udp|sctp",
                "protocol (default: all three)",
            ),
            flag(
                "--ports",
                "LIST",
                "destination ports, such as 80,443,8000-8010",
            ),
            flag("--mark", "N", "set this mark"),
            flag("--drop", "", "drop the packet"),
            flag("--host", "", "leave the packet to the host"),
            flag(
                "--position",
                "N",
                "insert the rule here (default: at the end)",
            ),
        ],
        run: mark::run,
    },
    Operator {
        name: "local",
        arguments: "[list | add ADDRESS... | del ADDRESS... | hairpin on|off]",
        summary: "manage the local addresses of full NAT",
        text: "Servers added with --fullnat see one of these addresses instead of the client's and reply to it, whatever their gateway is. For addresses that the host does not have, the engine answers ARP and neighbour discovery. Each address carries 64,512 connections to each server. With hairpin on, NAT (-m) also translates the source of clients whose replies would bypass the director: those on a server's own network, and servers of the same service.",
        flags: &[],
        run: local::run,
    },
    Operator {
        name: "limit",
        arguments: "SERVICE",
        summary: "show or set what a service accepts at most",
        text: "SERVICE is VIP:PORT (TCP), tcp:VIP:PORT, udp:VIP:PORT, sctp:VIP:PORT or fwmark:N. Without an option, the limits in force are shown. What exceeds a limit is dropped and counted (lvsadm drops); existing connections go on. For a service of lvsd, write limits = { ... } in its file.",
        flags: &[
            flag("--connections", "N", "connections at a time; 0: no limit"),
            flag(
                "--rate",
                "N",
                "new connections per second, also the burst; 0: no limit",
            ),
            flag(
                "--source-rate",
                "N",
                "the same from one source; 0: no limit",
            ),
            flag(
                "--source-bits-v4",
                "N",
                "prefix length of a source in IPv4 (default: 32)",
            ),
            flag(
                "--source-bits-v6",
                "N",
                "prefix length of a source in IPv6 (default: 64)",
            ),
            flag("--off", "", "remove the limits that are not given as well"),
        ],
        run: limit::run,
    },
    Operator {
        name: "filter",
        arguments: "[list [SERVICE|all] | add SERVICE|all | del SERVICE|all | set SERVICE|all | off SERVICE|all]",
        summary: "manage whose new connections are accepted, by source prefix",
        text: "SERVICE is as for lvsadm limit; the filter of all is asked for every service. The longest prefix that contains the source of a new connection decides, and of the same prefix in both the service's own. A source in no prefix is accepted, unless any are allowed. What is denied is dropped and counted (lvsadm drops: filtered); existing connections go on. set replaces a filter, add and del change it, off removes it. A filter has up to 65,536 prefixes.",
        flags: &[
            flag("--allow", "LIST", "prefixes, separated by commas"),
            flag("--deny", "LIST", "prefixes, separated by commas"),
            flag(
                "--allow-file",
                "FILE",
                "prefixes, separated by blanks or line ends; # begins a comment",
            ),
            flag("--deny-file", "FILE", "the same, denied"),
        ],
        run: filter::run,
    },
    Operator {
        name: "capture",
        arguments: "[FILTER]",
        summary: "write packets as they arrive, with the director's verdict, as pcapng",
        text: "FILTER is any of tcp, udp, sctp, icmp, icmp6, host ADDRESS, port N, dropped; all must match. The verdict is the comment of each packet (frame.comment in tshark and Wireshark). Ctrl-C ends the capture.",
        flags: &[
            flag("-w", "FILE", "output file; - is standard output"),
            flag("-c", "N", "exit after N packets"),
        ],
        run: capture::run,
    },
    Operator {
        name: "doctor",
        arguments: "",
        summary: "check this host and the real servers for common problems",
        text: "Each finding comes with a remedy. The exit status is 1 if there are any.",
        flags: &[],
        run: doctor::run,
    },
    Operator {
        name: "completions",
        arguments: "bash|zsh|fish",
        summary: "print completions for a shell",
        text: "For example: lvsadm completions bash > /etc/bash_completion.d/lvsadm",
        flags: &[],
        run: shell::completions,
    },
    Operator {
        name: "man",
        arguments: "",
        summary: "print the manual page",
        text: "For example: lvsadm man > /usr/local/share/man/man8/lvsadm.8",
        flags: &[],
        run: shell::man,
    },
];

//! The table of all additional commands.

use super::{
    Flag, Operator, Outcome, Words, capture, diff, doctor, drain, explain, filter, limit, local,
    maintenance, mark, realserver, shell, simple, sync, watch,
};
use crate::invocation::Invocation;

/// The options of a command: name, argument (if any) and help text of each.
macro_rules! flags {
    ($($name:literal $($argument:literal)?: $help:literal;)*) => {
        &[$(Flag { name: $name, argument: concat!($($argument)?), help: $help }),*]
    };
}

/// All operator commands, for the dispatcher, the help, the completions and the manual page.
pub(crate) const OPERATORS: &[Operator] = &[
    Operator {
        name: "watch",
        arguments: "",
        summary: "show services and servers with rates, refreshed at an interval",
        text: "Rates are per second, since the previous refresh. In a terminal, q or Ctrl-C quits, and s changes the sort order.",
        flags: flags! {
            "--interval" "SECONDS": "refresh interval (default: 1)";
            "--count" "N": "exit after N refreshes";
            "--sort" "rate|bytes|active|name": "sort order (default: rate)";
            "--no-color": "no colours, as with NO_COLOR";
        },
        examples: &["--interval 5", "--count 1 --sort active"],
        run: watch::run,
    },
    Operator {
        name: "explain",
        arguments: "tcp|udp|sctp SRC:PORT VIP:PORT",
        summary: "show the decision about a new packet, and its reason",
        text: "Shows the firewall mark, the service, the connection or persistence template that decides, and the slot in the scheduler's hash table. It lists every server with the reason why it can or cannot be chosen, names the chosen one, and shows whether the kernel fast path forwards the connection, or why not. Nothing is changed.",
        flags: flags! {
            "--mark" "N": "use this firewall mark, instead of the result of the mark rules";
            "--interface" "NAME": "use this incoming interface, for mark rules that match an interface";
        },
        examples: &["tcp 198.51.100.7:4000 192.0.2.10:80"],
        run: explain::run,
    },
    Operator {
        name: "drain",
        arguments: "SERVICE SERVER",
        summary: "take a server out of service without breaking connections",
        text: "Sets the weight to 0, waits until the last connection has ended, and shows how many remain. SERVICE is VIP:PORT (TCP), tcp:VIP:PORT, udp:VIP:PORT, sctp:VIP:PORT, fwmark:N, fwmark6:N, or the name of a service in the file of the running lvsd. When interrupted, or when the deadline passes without --undo, the server keeps weight 0. For a service of lvsd, the command requests the drain from lvsd, which keeps the server drained over reloads, restarts and reboots, until lvsadm undrain.",
        flags: flags! {
            "--deadline" "TIME": "stop after 90s, 10m or 1h30m, with exit status 1";
            "--active": "do not wait for closing connections (InActConn)";
            "--delete": "delete the server when it is drained";
            "--force": "proceed even if the server is the last usable one of a service of lvsd";
            "--undo": "restore the weight when the deadline passes";
            "--why" "TEXT": "the reason of the drain, for lvsd status (services of lvsd)";
            "--for" "TIME": "end the drain automatically after this time (services of lvsd)";
            "--no-wait": "do not wait until the last connection has ended";
        },
        examples: &[
            "192.0.2.10:80 10.0.0.11:80 --deadline 10m",
            "udp:192.0.2.10:53 10.0.0.11:53 --why \"new disk\"",
        ],
        run: drain::run,
    },
    Operator {
        name: "undrain",
        arguments: "SERVICE|all SERVER",
        summary: "return a drained server, or one in maintenance, to service",
        text: "For a service of lvsd, ends lvsadm drain and lvsadm maintenance. For other services, sets the weight of the server to --weight.",
        flags: flags! {
            "--weight" "N": "the weight, for services that lvsd does not own (default: 1)";
        },
        examples: &["192.0.2.10:80 10.0.0.11:80", "all 10.0.0.11"],
        run: maintenance::undrain,
    },
    Operator {
        name: "maintenance",
        arguments: "SERVICE|all SERVER",
        summary: "take a server out of services of lvsd, with a deadline for its connections",
        text: "The server receives no new connections. When its last connection has ended, at the latest after the service's drain time, lvsd removes it; on_server_down decides about the remaining connections. lvsd keeps it in maintenance over reloads, restarts and reboots, until lvsadm undrain. all is every service; SERVER without a port is every port of that address, also of servers that a later reload adds.",
        flags: flags! {
            "--force": "proceed even if the server is the last usable one of a service of lvsd";
            "--why" "TEXT": "the reason of the maintenance, for lvsd status";
            "--for" "TIME": "end the maintenance automatically after this time: 90s, 10m, 2h, 1d";
        },
        examples: &["all 10.0.0.11 --why \"kernel update\" --for 2h"],
        run: maintenance::run,
    },
    Operator {
        name: "realserver-setup",
        arguments: "VIP...",
        summary: "print the commands that make a host a real server for a forwarding method",
        text: "Prints commands for a shell on the real server (Linux), and runs none of them. With --undo, prints the commands that revert the settings.",
        flags: flags! {
            "--method" "dr|tun|nat": "forwarding method (required)";
            "--tunnel" "ipip|gre|gue": "encapsulation of tun (default: ipip)";
            "--port" "N": "destination port of gue (default: 6080)";
            "--gateway" "ADDRESS": "the director's address on the servers' network, for nat";
            "--undo": "print the commands that revert the settings";
        },
        examples: &[
            "--method dr 192.0.2.10 2001:db8::10",
            "--method nat --gateway 10.0.0.1 192.0.2.10",
        ],
        run: realserver::run,
    },
    Operator {
        name: "drops",
        arguments: "",
        summary: "show packets that were dropped or passed to the host, by reason",
        text: "Each reason is listed with its count and its fix.",
        flags: flags! {
            "--all": "include reasons that have not occurred";
        },
        examples: &["--all"],
        run: simple::drops,
    },
    Operator {
        name: "workers",
        arguments: "",
        summary: "show the state and the load of each packet worker",
        text: "Each connection belongs to one worker. Other workers pass its packets to that worker, and drop them if its queue is full. Frames that arrive faster than a worker reads them are lost.",
        flags: &[],
        examples: &[],
        run: simple::workers,
    },
    Operator {
        name: "sysctl",
        arguments: "[NAME[=VALUE]]",
        summary: "read or write the sysctls of net.ipv4.vs",
        text: "Without NAME, all of them are shown.",
        flags: &[],
        examples: &["expire_nodest_conn=1"],
        run: simple::sysctl,
    },
    Operator {
        name: "mark",
        arguments: "list | add | del N",
        summary: "manage the rules that set firewall marks",
        text: "The first rule that matches a packet decides. A service with that mark (-f) then accepts it, so that one service can have several ports or addresses.",
        flags: flags! {
            "--destination" "NETWORK": "destination address or network; without it, a rule with --source and --drop or --host applies to packets to all services";
            "--source" "NETWORK": "source address or network";
            "--interface" "NAME": "incoming interface";
            "--protocol" "tcp|udp|sctp": "protocol (default: all three)";
            "--ports" "LIST": "destination ports, such as 80,443,8000-8010";
            "--mark" "N": "set this mark";
            "--drop": "drop the packet";
            "--host": "pass the packet to the host";
            "--position" "N": "insert the rule at this position (default: at the end)";
        },
        examples: &["add --destination 192.0.2.10 --ports 80,443 --mark 7"],
        run: mark::run,
    },
    Operator {
        name: "local",
        arguments: "[list | add ADDRESS... | del ADDRESS... | hairpin on|off]",
        summary: "manage the local addresses of full NAT",
        text: "Servers added with --fullnat receive one of these addresses instead of the client's and reply to it, through any gateway. For addresses that the host does not have, the dataplane answers ARP and neighbour discovery. Each address carries 64,512 connections to each server. With hairpin on, NAT (-m) also translates the source of clients whose replies would bypass the director: those on a server's own network, and servers of the same service.",
        flags: &[],
        examples: &["add 10.0.0.2"],
        run: local::run,
    },
    Operator {
        name: "sync",
        arguments: "",
        summary: "show the replication with peers, and whether this director is ready",
        text: "Shows for each peer (lvs-dataplane --sync-peer): whether it is in step, how many of its connections this director has, how many are missing, the last full sync, and the delay of updates. It also shows which services of the peer differ from those of this director, so that the two choose different servers for a client (lvsadm diff shows the differences). This director is ready when it has the connections of its peers, or has waited long enough for those that cannot be reached (--sync-wait). The daemons of --start-daemon are in `lvsadm -L --daemon'.",
        flags: flags! {
            "--wait" "TIME": "wait until this director is ready; exit status 1 if it is not ready after this time";
        },
        examples: &["--wait 30s"],
        run: sync::run,
    },
    Operator {
        name: "diff",
        arguments: "SOCKET",
        summary: "show the services and servers in which another director differs from this one",
        text: "SOCKET is the control socket of the other director: a path, or @NAME. Use ssh -L to reach the socket of another host. The command compares the settings that the choice of a server depends on, and the paths to servers; it ignores counters, limits and filters. The exit status is 1 if there are differences.",
        flags: &[],
        examples: &["/run/other.sock"],
        run: diff::run,
    },
    Operator {
        name: "limit",
        arguments: "SERVICE",
        summary: "show or set the limits of a service",
        text: "SERVICE is VIP:PORT (TCP), tcp:VIP:PORT, udp:VIP:PORT, sctp:VIP:PORT, fwmark:N, fwmark6:N, or the name of a service in the file of the running lvsd. Without an option, the limits in force are shown. Packets above a limit are dropped and counted (lvsadm drops); existing connections continue. For a service of lvsd, write limits = { ... } in its file.",
        flags: flags! {
            "--connections" "N": "connections at a time; 0: no limit";
            "--rate" "N": "new connections per second, also the burst; 0: no limit";
            "--source-rate" "N": "new connections per second from one source, also the burst; 0: no limit";
            "--source-bits-v4" "N": "prefix length of a source in IPv4 (default: 32)";
            "--source-bits-v6" "N": "prefix length of a source in IPv6 (default: 64)";
            "--off": "also remove the limits that no other option sets";
        },
        examples: &["192.0.2.10:80 --source-rate 20"],
        run: limit::run,
    },
    Operator {
        name: "filter",
        arguments: "[list [SERVICE|all] | add SERVICE|all | del SERVICE|all | set SERVICE|all | off SERVICE|all | save | restore]",
        summary: "manage the filters for new connections, by source prefix",
        text: "SERVICE is as for lvsadm limit; the filter of all applies to every service. The longest prefix that contains the source of a new connection decides; if both filters contain it, the service's own decides. A source in no prefix is accepted, unless one of the two filters allows a prefix: then it is denied. Packets of denied sources are dropped and counted (lvsadm drops: filtered); existing connections continue. set replaces a filter, add and del change it, off removes it. save prints all filters, which lvsadm -S does not; restore reads them from its input and replaces all filters by them, or changes nothing. A filter has up to 65,536 prefixes.",
        flags: flags! {
            "--allow" "LIST": "prefixes, separated by commas";
            "--deny" "LIST": "prefixes, separated by commas";
            "--allow-file" "FILE": "prefixes, separated by whitespace or line breaks; # begins a comment";
            "--deny-file" "FILE": "prefixes, separated by whitespace or line breaks; # begins a comment";
        },
        examples: &["add all --deny 198.51.100.0/24"],
        run: filter::run,
    },
    Operator {
        name: "capture",
        arguments: "[FILTER]",
        summary: "write packets as they arrive, with the director's verdict, as pcapng",
        text: "FILTER is any of tcp, udp, sctp, icmp, icmp6, host ADDRESS, port N, dropped; all must match. The verdict is the comment of each packet (frame.comment in tshark and Wireshark). Ctrl-C ends the capture.",
        flags: flags! {
            "-w" "FILE": "output file; - is standard output";
            "-c" "N": "exit after N packets";
        },
        examples: &["tcp port 80 -w -", "dropped -c 100 -w drops.pcapng"],
        run: capture::run,
    },
    Operator {
        name: "doctor",
        arguments: "",
        summary: "check this host and the real servers for common problems",
        text: "Each finding is listed with its fix. Dropped and lost packets are findings until five minutes after the last one. The exit status \
               is 1 if there are findings.",
        flags: flags! {
            "--since" "start": "also report packets that the dataplane has dropped since its start, and network cards since the start of their drivers";
        },
        examples: &[],
        run: doctor::run,
    },
    Operator {
        name: "completions",
        arguments: "bash|zsh|fish",
        summary: "print completions for a shell",
        text: "For example: lvsadm completions bash > /etc/bash_completion.d/lvsadm",
        flags: &[],
        examples: &["bash"],
        run: completions,
    },
    Operator {
        name: "man",
        arguments: "",
        summary: "print the manual page",
        text: "For example: lvsadm man > /usr/local/share/man/man8/lvsadm.8",
        flags: &[],
        examples: &[],
        run: man,
    },
];

fn completions(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    shell::completions(run, words, OPERATORS)
}

fn man(run: &mut Invocation<'_>, words: &Words) -> Outcome {
    shell::man(run, words, OPERATORS)
}

//! Texts of messages.

/// A number of things: `1 error`, `2 errors`, `0 addresses`.
pub(crate) fn counted(n: usize, thing: &str) -> String {
    let end = match thing {
        _ if n == 1 => "",
        _ if thing.ends_with('s') => "es",
        _ => "s",
    };
    format!("{n} {thing}{end}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noun_is_plural_unless_the_number_is_one() {
        assert_eq!(counted(0, "server"), "0 servers");
        assert_eq!(counted(1, "server"), "1 server");
        assert_eq!(counted(2, "local address"), "2 local addresses");
        assert_eq!(counted(1, "local address"), "1 local address");
    }
}

//! Tables of test cases as text.

/// Parses a table of test cases: one case a line, with columns separated by `|`. In a column, ` ; `
/// is a line break. Lines that begin with `//` are comments.
pub(crate) fn cases<const N: usize>(table: &str) -> Vec<[&'static str; N]> {
    let lines = table.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    let column = |text: &str| -> &'static str {
        let text: &str = text.replace(" ; ", "\n").leak();
        text.trim_matches(' ')
    };
    let columns = |line: &str| line.split('|').map(column).collect::<Vec<_>>();
    lines
        .map(|line| {
            let columns = columns(line).try_into();
            columns.unwrap_or_else(|_| panic!("the case does not have {N} columns: {line}"))
        })
        .collect()
}

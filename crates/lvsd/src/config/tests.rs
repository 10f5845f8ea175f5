use super::*;
#[test]
fn smoke() {
    let text = r#"
[[service]]
name = "web"
adress = "192.0.2.10:80"
scheduler = "wcl"
forward = "masq"
vips = 3
check = { type = "tcp", intervall = "5s", timeout = 2 }
[[service.server]]
address = "10.0.0.11:80"
weight = "5"
[[service]]
name = "x"
address = "192.0.2.10:81"
forward = "dr"
[[service.server]]
address = "10.0.0.11:80"
[[service.server]]
address = "192.0.2.10:81"
"#;
    eprintln!("{}", Config::from_toml("x.toml", text).unwrap_err());
}

//! The page in a real browser: its charts are drawn, its tables sort, and no name in it is more than
//! a name.

use crate::fleet::Fleet;
use isobath_survey::SortBy;
use isobath_survey::render::{self, Listing};
use isobath_testkit::process::{Finished, run};
use isobath_testkit::tools;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;

/// Run before anything else of the page: remembers what goes wrong.
const WATCH: &str = r#"
window.seen = { errors: [], alerts: 0 };
addEventListener("error", (event) => seen.errors.push(String(event.message)));
window.alert = () => { seen.alerts += 1; };
"#;

/// Run last: uses the page, and leaves what it saw in it.
const USE: &str = r#"
addEventListener("load", () => {
  const charts = {};
  for (const figure of document.querySelectorAll("figure")) {
    const svg = figure.querySelector("svg");
    const box = svg.getBoundingClientRect();
    const lines = [...svg.querySelectorAll("path[data-points]")].map((path) => {
      const { width, height } = path.getBBox();
      return { points: JSON.parse(path.dataset.points).length, width, height,
        paint: getComputedStyle(path).stroke + getComputedStyle(path).fill };
    });
    svg.dispatchEvent(new PointerEvent("pointermove",
      { clientX: box.left + box.width * 0.9, clientY: box.top + 50 }));
    const tip = document.getElementById("tip");
    charts[figure.id] = { width: box.width, height: box.height, lines, tip: tip.textContent,
      shown: !tip.hidden, dots: svg.querySelectorAll(".dot[visibility=visible]").length,
      labels: svg.querySelectorAll("text").length,
      within: [...svg.querySelectorAll("text")].every((text) => {
        const { left, right } = text.getBoundingClientRect();
        return left >= box.left - 20 && right <= box.right + 20;
      }) };
    svg.dispatchEvent(new PointerEvent("pointerleave"));
    charts[figure.id].hidden = tip.hidden;
  }
  const table = document.getElementById("chains");
  const column = (at) => [...table.tBodies[0].rows].map((row) => row.cells[at].textContent);
  const click = (at) => table.tHead.rows[0].cells[at].querySelector("button").click();
  const sorted = {};
  click(2); sorted.down = column(2);
  click(2); sorted.up = column(2);
  click(0); sorted.names = column(0);
  const shown = [...table.tHead.rows[0].cells].filter((cell) =>
    cell.getBoundingClientRect().right <= table.parentElement.getBoundingClientRect().right);
  const headings = shown.map((cell) => cell.textContent);
  const tiles = [...document.querySelectorAll(".tile")].map((tile) => tile.innerText);
  const foreign = [...document.querySelectorAll("*")].filter((element) =>
    ["IMG", "IFRAME", "OBJECT", "LINK", "A", "B-"].includes(element.tagName) ||
    [...element.attributes].some((one) => one.name.startsWith("on"))).length;
  const result = document.createElement("pre");
  result.id = "result";
  result.textContent = JSON.stringify({ ...seen, pwned: window.pwned === 1, charts, sorted, headings, tiles, foreign,
    scripts: document.scripts.length, background: getComputedStyle(document.body).backgroundColor });
  document.body.append(result);
});
"#;

fn hostile_fleet() -> Fleet {
    let fleet = Fleet::new();
    let names: [&[u8]; 8] = [
        b"<script>window.pwned=1<",
        b"\"><img src=x onerror=window.pwned=1>.qcow2",
        b"' onmouseover='window.pwned=1' x='.qcow2",
        b"--><svg onload=window.pwned=1>.qcow2",
        b"<b>bold.qcow2",
        b"\xff\xfe\xe2\x80\xae.qcow2",
        b"</style><style>body{display:none}.qcow2",
        b"&lt;&#60;script.qcow2",
    ];
    for name in names {
        // A name with a slash is a directory and a file.
        let path = Path::new(OsStr::from_bytes(name));
        let path = if name.ends_with(b"<") { path.join("script>.qcow2") } else { path.to_owned() };
        fleet.image(path, "<script>window.pwned=1</script>");
    }
    fleet.image("json", "json:{\"</script><script>window.pwned=1</script>\":1}");
    for at in 0..40 {
        let below = if at == 0 { String::new() } else { format!("long-{:02}", at - 1) };
        fleet.image(format!("long-{at:02}"), &below);
        fleet.date(format!("long-{at:02}"), at * 80_000);
    }
    fleet
}

fn page(fleet: &Fleet) -> String {
    let survey = fleet.survey();
    render::html(&survey, &survey.report(), Listing { count: 50, sort: SortBy::Length })
}

/// The page with the scripts that watch and use it, let in by the page's own number.
fn watched(page: &str) -> String {
    let nonce = page.split("<style nonce=\"").nth(1).unwrap().split('"').next().unwrap();
    let script = |text: &str| format!("<script nonce=\"{nonce}\">{text}</script>");
    let (head, rest) = page.split_once("<title>").unwrap();
    let rest = rest.replace("</body>", &format!("{}</body>", script(USE)));
    format!("{head}{}<title>{rest}", script(WATCH))
}

/// Without the policy, which hides mistakes in escaping.
fn unprotected(page: &str) -> String {
    let begin = page.find("<meta http-equiv").unwrap();
    let end = begin + page[begin..].find('>').unwrap() + 1;
    [&page[..begin], &page[end..]].concat()
}

fn browse(directory: &Path, page: &Path, arguments: &[&str]) -> Finished {
    let browser = ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find_map(tools::find)
        .unwrap_or_else(|| tools::require("chromium-headless-shell"));
    let profile = format!("--user-data-dir={}", directory.join("profile").display());
    let mut command = Command::new(browser);
    command
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
        .args(["--hide-scrollbars", "--window-size=1000,2600", &profile])
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .current_dir(directory)
        .env("HOME", directory);
    run(&mut command).ok()
}

/// What the browser saw of a page.
fn seen(page: &str) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("page.html");
    fs::write(&file, watched(page)).unwrap();
    let dom = browse(directory.path(), &file, &["--dump-dom"]).text();
    let result =
        dom.split("<pre id=\"result\">").nth(1).unwrap_or_else(|| panic!("no result:\n{dom}"));
    let result = result.split("</pre>").next().unwrap();
    // The text of an element, as the browser writes it.
    let text = result.replace("&lt;", "<").replace("&gt;", ">").replace("&nbsp;", "\u{a0}");
    serde_json::from_str(&text.replace("&amp;", "&")).unwrap()
}

#[test]
fn charts_are_drawn_tables_sort_and_names_stay_names() {
    let fleet = hostile_fleet();
    let page = page(&fleet);
    for page in [&page, &unprotected(&page)] {
        let seen = seen(page);
        assert_eq!(seen["errors"], serde_json::json!([]));
        assert_eq!(
            (&seen["pwned"], &seen["alerts"], &seen["foreign"]),
            (&false.into(), &0.into(), &0.into())
        );
        // Ours, the one that watches and the one that uses the page.
        assert_eq!(seen["scripts"], 3);
        let charts = seen["charts"].as_object().unwrap();
        let names: Vec<_> = charts.keys().collect();
        assert_eq!(names, ["lengths", "longest", "intervals", "made", "costs", "memory"]);
        for (name, chart) in charts {
            let at_least = |value: &Value, least: f64| {
                assert!(value.as_f64().unwrap() >= least, "{name}: {value} < {least}\n{chart:#}");
            };
            at_least(&chart["width"], 300.0);
            at_least(&chart["height"], 100.0);
            at_least(&chart["labels"], 6.0);
            assert_eq!(chart["within"], true, "{name}: a label is cut off");
            let lines = chart["lines"].as_array().unwrap();
            assert!(!lines.is_empty());
            for line in lines {
                at_least(&line["points"], 1.0);
                at_least(&line["width"], 20.0);
                assert!(line["paint"].as_str().unwrap().contains("rgb("), "{line}");
            }
            let steep = lines.iter().any(|line| line["height"].as_f64().unwrap() > 50.0);
            assert!(steep, "{name} is flat: {chart:#}");
            assert_eq!(chart["dots"], lines.len(), "{name}");
            assert_eq!((&chart["shown"], &chart["hidden"]), (&true.into(), &true.into()), "{name}");
            assert!(!chart["tip"].as_str().unwrap().is_empty(), "{name}");
        }
        let tip = charts["lengths"]["tip"].as_str().unwrap();
        assert_eq!(tip, "chains: 90.0 % up to 1\nfiles: 18.4 % up to 1");
        let column = |name: &str| -> Vec<String> {
            seen["sorted"][name]
                .as_array()
                .unwrap()
                .iter()
                .map(|cell| cell.as_str().unwrap().to_owned())
                .collect()
        };
        let (down, up) = (column("down"), column("up"));
        assert_eq!((down.len(), down[0].as_str(), up[9].as_str()), (10, "40", "40"));
        assert!(down[1..].iter().all(|cell| cell == "1+"), "{down:?}");
        // Without scrolling to the side.
        let headings = seen["headings"].as_array().unwrap();
        assert_eq!(headings[..3], ["active image", "advice", "length"]);
        let tiles = seen["tiles"].as_array().unwrap();
        let told = |words: &str| tiles.iter().any(|tile| tile.as_str().unwrap().contains(words));
        assert!(told("repair 9, merge 1, index 0"), "{tiles:#?}");
        let names = column("names");
        let root = fleet.root().display();
        for expected in [
            "<script>window.pwned=1</script>.qcow2",
            "\"><img src=x onerror=window.pwned=1>.qcow2",
            "\\xff\\xfe\\u{202e}.qcow2",
            "&lt;&#60;script.qcow2",
        ] {
            assert!(names.contains(&format!("{root}/{expected}")), "{expected}: {names:#?}");
        }
    }
}

#[test]
fn the_policy_stops_a_script_and_the_test_would_notice_one() {
    let fleet = Fleet::new();
    fleet.image("base", "");
    fleet.image("top", "base");
    let page = page(&fleet);
    let attack = "<main><script>window.pwned=1;alert(1)</script><script>no(</script>";
    let attacked = page.replace("<main>", attack);
    let stopped = seen(&attacked);
    assert_eq!((&stopped["pwned"], &stopped["alerts"]), (&false.into(), &0.into()));
    let ran = seen(&unprotected(&attacked));
    assert_eq!((&ran["pwned"], &ran["alerts"]), (&true.into(), &1.into()));
    assert_eq!(ran["errors"].as_array().unwrap().len(), 1);
}

#[test]
fn it_can_be_looked_at_in_the_light_and_in_the_dark() {
    let fleet = hostile_fleet();
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("page.html");
    fs::write(&file, page(&fleet)).unwrap();
    let mut pictures = Vec::new();
    for scheme in ["0", "1"] {
        let picture = directory.path().join(format!("{scheme}.png"));
        let screenshot = format!("--screenshot={}", picture.display());
        let scheme = format!("--blink-settings=preferredColorScheme={scheme}");
        let _ = browse(directory.path(), &file, &[&screenshot, &scheme]);
        let bytes = fs::read(picture).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 50_000, "{} bytes", bytes.len());
        pictures.push(bytes);
    }
    assert!(pictures[0] != pictures[1], "both look alike");
}

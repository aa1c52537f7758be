use lab::sim::*;
use std::path::Path;
#[test]
fn tmp() {
    let s = Scenario::read(Path::new("scenarios/f2-twenty-on-23.toml")).unwrap();
    let mut s = s; s.seconds = 16.0; let o = simulate(&s, Name::Broker).unwrap();
    for vm in &o.vms { println!("{} {:.2} {:?}", vm.name, vm.run, vm.usable); }
}

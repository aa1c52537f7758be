//! Generates the gRPC code from `hintbroker/v1/*.proto` with protox, so that no protoc is needed.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let files = [
        "hintbroker/v1/hint.proto",
        "hintbroker/v1/guest.proto",
        "hintbroker/v1/control.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={file}");
    }
    let descriptors = protox::compile(files, ["."])?;
    tonic_prost_build::configure()
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}

# docker buildx bake -f docker/docker-bake.hcl [TARGET ...]    from the root of the checkout
#
# Every variable may be set in the environment. scripts/build_image.py sets revision, time and labels from the checkout.

variable "SOL_REVISION" { default = "unknown" }
variable "SOURCE_DATE_EPOCH" { default = "0" }
variable "DEBIAN_BASE" { default = "debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171" }
variable "CUDA_BASE" { default = "nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04@sha256:24c8e3581ea6330038b0d374920721983312627f8adbfcf390bdb4b399d280ed" }
# Dated archives of Debian and Ubuntu; empty takes the archive as it is today.
variable "DEBIAN_SNAPSHOT" { default = "20260901T000000Z" }
variable "UBUNTU_SNAPSHOT" { default = "20260801T000000Z" }
# `required` builds SGLang's kernels ahead and fails without nvcc; `skip` leaves them out and the image says so.
variable "KERNELS" { default = "required" }
# A company's certificates, for the build alone. /dev/null: none.
variable "SOL_CA_BUNDLE" { default = "/dev/null" }

group "default" { targets = ["sol-cpu", "sol-verify"] }
group "gpu" { targets = ["sol-rtx4090", "sol-h100x4", "sol-a100x4"] }

target "common" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  secret     = ["id=ca_bundle,src=${SOL_CA_BUNDLE}"]
  args = {
    SOL_REVISION      = SOL_REVISION
    SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH
    DEBIAN_BASE       = DEBIAN_BASE
    CUDA_BASE         = CUDA_BASE
  }
}

target "sol-cpu" {
  inherits = ["common"]
  target   = "sol-target"
  tags     = ["sol-cpu"]
  args     = { BASE = "debian", SOL_TARGET = "cpu", APT_SNAPSHOT = DEBIAN_SNAPSHOT, KERNELS = "none" }
}

target "sol-verify" {
  inherits  = ["common"]
  target    = "sol-verify"
  tags      = ["sol-verify"]
  args      = { BASE = "debian", APT_SNAPSHOT = DEBIAN_SNAPSHOT }
}

target "cuda" {
  inherits  = ["common"]
  target    = "sol-target"
  platforms = ["linux/amd64"]
  args      = { BASE = "cuda", APT_SNAPSHOT = UBUNTU_SNAPSHOT, KERNELS = KERNELS }
}

target "sol-rtx4090" {
  inherits = ["cuda"]
  tags     = ["sol-rtx4090"]
  args     = { SOL_TARGET = "rtx4090" }
}

target "sol-h100x4" {
  inherits = ["cuda"]
  tags     = ["sol-h100x4"]
  args     = { SOL_TARGET = "h100x4" }
}

target "sol-a100x4" {
  inherits = ["cuda"]
  tags     = ["sol-a100x4"]
  args     = { SOL_TARGET = "a100x4" }
}

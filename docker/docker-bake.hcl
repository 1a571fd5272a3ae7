# docker buildx bake -f docker/docker-bake.hcl [TARGET ...]    from the root of the checkout
#
# Every variable may be set in the environment. scripts/build_image.py sets the revision from the checkout.

variable "SOL_REVISION" { default = "unknown" }
# The moment of Debian's archive below: what a build writes later, in its cache as well, gets this time. The commit's would be
# younger than a cached layer, whose times BuildKit would then keep.
variable "SOURCE_DATE_EPOCH" { default = "1788220800" }
variable "DEBIAN_BASE" { default = "debian:bookworm-20260824-slim@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171" }
variable "CUDA_BASE" { default = "nvidia/cuda:12.8.1-cudnn-devel-ubuntu24.04@sha256:24c8e3581ea6330038b0d374920721983312627f8adbfcf390bdb4b399d280ed" }
# Dated archives of Debian and Ubuntu; empty takes the archive as it is today.
variable "DEBIAN_SNAPSHOT" { default = "20260901T000000Z" }
variable "UBUNTU_SNAPSHOT" { default = "20260801T000000Z" }
# `required` builds SGLang's kernels and ours ahead and fails without nvcc, `triton` ours alone, `none` none; the image says which.
variable "KERNELS" { default = "required" }
# A company's certificates, for the build alone. /dev/null: none.
variable "SOL_CA_BUNDLE" { default = "/dev/null" }

function "base_name" {
  params = [image]
  result = split("@", image)[0]
}
function "base_digest" {
  params = [image]
  result = join("", slice(split("@", image), 1, length(split("@", image))))
}

group "default" { targets = ["sol-cpu", "sol-verify"] }
group "gpu" { targets = ["sol-rtx4090", "sol-h100x4", "sol-a100x4", "sol-h200"] }

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
  inherits = ["common", "labels-cpu"]
  target   = "sol-target"
  tags     = ["sol-cpu"]
  args     = { BASE = "debian", SOL_TARGET = "cpu", APT_SNAPSHOT = DEBIAN_SNAPSHOT, KERNELS = "none" }
}

target "sol-verify" {
  inherits = ["common", "labels-verify"]
  target   = "sol-verify"
  tags     = ["sol-verify"]
  args     = { BASE = "debian", APT_SNAPSHOT = DEBIAN_SNAPSHOT }
}

# For both machines that judge records: needs a builder of each, or QEMU. The locks hold wheels for both.
target "sol-verify-multi" {
  inherits  = ["sol-verify"]
  platforms = ["linux/amd64", "linux/arm64"]
}

target "cuda" {
  inherits  = ["common"]
  target    = "sol-target"
  platforms = ["linux/amd64"]
  args      = { BASE = "cuda", APT_SNAPSHOT = UBUNTU_SNAPSHOT, KERNELS = KERNELS }
}

target "sol-rtx4090" {
  inherits = ["cuda", "labels-rtx4090"]
  tags     = ["sol-rtx4090"]
  args     = { SOL_TARGET = "rtx4090" }
}

target "sol-h100x4" {
  inherits = ["cuda", "labels-h100x4"]
  tags     = ["sol-h100x4"]
  args     = { SOL_TARGET = "h100x4" }
}

target "sol-a100x4" {
  inherits = ["cuda", "labels-a100x4"]
  tags     = ["sol-a100x4"]
  args     = { SOL_TARGET = "a100x4" }
}

target "sol-h200" {
  inherits = ["cuda", "labels-h200"]
  tags     = ["sol-h200"]
  args     = { SOL_TARGET = "h200" }
}

# ---------------------------------------------------------------- labels, written by scripts/image_labels.py

target "labels-a100x4" {
  labels = {
    "org.opencontainers.image.base.name" = base_name(CUDA_BASE)
    "org.opencontainers.image.base.digest" = base_digest(CUDA_BASE)
    "org.sol-h3.recipe.sha256" = "725a1386c3671b2cab69ac16856b2f414f18ca90f974bf256e26b0abea949b99"
    "org.sol-h3.requirements.sha256" = "1a1befc91d091449563dbfc3512d5831c6823363f3326781a1c8c622bcbf477a"
    "org.sol-h3.sana.commit" = "6fb7eb11c3435555ec6d6adf0d5572d339d2c6eb"
    "org.sol-h3.sglang.commit" = "6fa3f9df11c8bdbc0e3b4ddc87a3d873343aca72"
    "org.sol-h3.torch" = "2.11.0+cu128"
  }
}

target "labels-cpu" {
  labels = {
    "org.opencontainers.image.base.name" = base_name(DEBIAN_BASE)
    "org.opencontainers.image.base.digest" = base_digest(DEBIAN_BASE)
    "org.sol-h3.recipe.sha256" = "2a8979f79787fbf4df4c36eb84f8daba5d23e2804f909206dfc73f66c4aa0e2f"
    "org.sol-h3.requirements.sha256" = "6ce5e1eafc2a50ac7385f5891e8f7d124c14465991dab8b2c986c9373a26e3f0"
    "org.sol-h3.sglang.commit" = "6fa3f9df11c8bdbc0e3b4ddc87a3d873343aca72"
    "org.sol-h3.torch" = "2.13.0+cpu"
  }
}

target "labels-h100x4" {
  labels = {
    "org.opencontainers.image.base.name" = base_name(CUDA_BASE)
    "org.opencontainers.image.base.digest" = base_digest(CUDA_BASE)
    "org.sol-h3.recipe.sha256" = "6be3e0c57406c8fd1a1be9186df6642b7f88830edb889dd9d03a1df95509394e"
    "org.sol-h3.requirements.sha256" = "1a1befc91d091449563dbfc3512d5831c6823363f3326781a1c8c622bcbf477a"
    "org.sol-h3.sana.commit" = "6fb7eb11c3435555ec6d6adf0d5572d339d2c6eb"
    "org.sol-h3.sglang.commit" = "6fa3f9df11c8bdbc0e3b4ddc87a3d873343aca72"
    "org.sol-h3.torch" = "2.11.0+cu128"
  }
}

target "labels-h200" {
  labels = {
    "org.opencontainers.image.base.name" = base_name(CUDA_BASE)
    "org.opencontainers.image.base.digest" = base_digest(CUDA_BASE)
    "org.sol-h3.recipe.sha256" = "73685fc2191bb950167c220455ff8b3e596fd2796352243cafef5deb59269aef"
    "org.sol-h3.requirements.sha256" = "1a1befc91d091449563dbfc3512d5831c6823363f3326781a1c8c622bcbf477a"
    "org.sol-h3.sglang.commit" = "6fa3f9df11c8bdbc0e3b4ddc87a3d873343aca72"
    "org.sol-h3.torch" = "2.11.0+cu128"
  }
}

target "labels-rtx4090" {
  labels = {
    "org.opencontainers.image.base.name" = base_name(CUDA_BASE)
    "org.opencontainers.image.base.digest" = base_digest(CUDA_BASE)
    "org.sol-h3.recipe.sha256" = "04b0264d07b041ec345c83ff71552eb5cd945f5bf305b5c241fd8f58b2747c87"
    "org.sol-h3.requirements.sha256" = "1a1befc91d091449563dbfc3512d5831c6823363f3326781a1c8c622bcbf477a"
    "org.sol-h3.sana.commit" = "6fb7eb11c3435555ec6d6adf0d5572d339d2c6eb"
    "org.sol-h3.sglang.commit" = "6fa3f9df11c8bdbc0e3b4ddc87a3d873343aca72"
    "org.sol-h3.torch" = "2.11.0+cu128"
  }
}

target "labels-verify" {
  labels = {
    "org.opencontainers.image.base.name" = base_name(DEBIAN_BASE)
    "org.opencontainers.image.base.digest" = base_digest(DEBIAN_BASE)
    "org.sol-h3.recipe.sha256" = "ef9b87141e2c47432fbc220b47f26213ffd23268975b1d23b1fdd6a35a08189f"
    "org.sol-h3.requirements.sha256" = "677e2604735a0444b1afa4f3397d02ba4b4278a3dd10aa712ef3677a66275b58"
  }
}

# The published images: `docker buildx bake -f docker-bake.hcl` builds those of compose.yaml for both architectures, with labels,
# annotations and attestations; .github/workflows/release.yaml pushes and signs them. Other architectures than the
# builder's need QEMU or a node of their own.
variable "HEADRACE_IMAGES" { default = "headrace-" }
variable "IMAGE_TAG" { default = "latest" }
# A release names the digest: python:3.11-slim-bookworm@sha256:…
variable "BASE_IMAGE" { default = "python:3.11-slim-bookworm" }
variable "TORCH_INDEX" { default = "https://download.pytorch.org/whl/cpu" }
variable "TORCH_CUDA_INDEX" { default = "https://download.pytorch.org/whl/cu130" }
# Not empty: for this machine's engine alone, which has neither other architectures nor attestations nor annotations.
variable "LOCAL" { default = "" }
# Of pyproject.toml, for transformer and predictor: buckets.
variable "MODEL_EXTRAS" { default = "" }
variable "SOURCE" { default = "" }
variable "REVISION" { default = "" }
# Seconds: the date of a release's commit; without it images have the time of their build.
variable "SOURCE_DATE_EPOCH" { default = "" }

function "label" {
  params = [title]
  result = {
    "org.opencontainers.image.title"     = "headrace-${title}"
    "org.opencontainers.image.licenses"  = "Apache-2.0"
    "org.opencontainers.image.source"    = SOURCE
    "org.opencontainers.image.revision"  = REVISION
    "org.opencontainers.image.version"   = IMAGE_TAG
    "org.opencontainers.image.created"   = SOURCE_DATE_EPOCH == "" ? timestamp() : timeadd("1970-01-01T00:00:00Z", "${SOURCE_DATE_EPOCH}s")
    "org.opencontainers.image.base.name" = BASE_IMAGE
  }
}

group "default" { targets = ["image", "predictor-cuda"] }

target "published" {
  dockerfile = "services/Dockerfile"
  platforms  = [for each in ["linux/amd64", "linux/arm64"] : each if LOCAL == ""]
  args       = { BASE_IMAGE = BASE_IMAGE, MODEL_EXTRAS = MODEL_EXTRAS, SOURCE_DATE_EPOCH = SOURCE_DATE_EPOCH == "" ? null : SOURCE_DATE_EPOCH }
  attest     = [for each in ["type=provenance,mode=max", "type=sbom"] : each if LOCAL == ""]
}

target "image" {
  matrix      = { part = ["transformer", "predictor", "logger", "loadtest"] }
  name        = part
  inherits    = ["published"]
  target      = part
  args        = { TORCH_INDEX = TORCH_INDEX }
  tags        = ["${HEADRACE_IMAGES}${part}:${IMAGE_TAG}"]
  labels      = label(part)
  annotations = [for name, value in label(part) : "index,manifest:${name}=${value}" if LOCAL == ""]
}

target "predictor-cuda" {
  inherits    = ["published"]
  target      = "predictor"
  args        = { TORCH_INDEX = TORCH_CUDA_INDEX, COMPILER = "gcc libc6-dev" }
  tags        = ["${HEADRACE_IMAGES}predictor:${IMAGE_TAG}-cuda"]
  labels      = label("predictor-cuda")
  annotations = [for name, value in label("predictor-cuda") : "index,manifest:${name}=${value}" if LOCAL == ""]
}

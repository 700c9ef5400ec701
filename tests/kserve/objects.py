"""Reads Kubernetes objects from standard input by the models of KServe's and Kubernetes' Python clients.

A list of JSON objects; every field must be one that the model of its object has, of its type, and the models' own
checks must pass. Prints the kinds.
"""

import json
import re
import sys

import kserve
import kubernetes.client

CONTAINER = re.compile(r"(list|dict)[(\[](?:str, )?(.+)[)\]]", re.IGNORECASE)
PLAIN = {"str": str, "int": int, "bool": bool, "float": (int, float)}
ANY = {"object", "ResourceQuantity", "IntOrString"}


def model_of(name):
    found = getattr(kserve, name, None) or getattr(kubernetes.client, name, None)
    assert found is not None, f"neither client has {name}"
    return found


def read(value, kind, path):
    """The value as the client's object; raises AssertionError with the path of what is not as the model has it."""
    if kind in ANY:
        return value
    if kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{path} is not of the type {kind}"
        assert kind == "bool" or not isinstance(value, bool), f"{path} is not of the type {kind}"
        return value
    if nested := CONTAINER.fullmatch(kind):
        shape, item = nested.groups()
        if shape.lower() == "list":
            assert isinstance(value, list), f"{path} is no list"
            return [read(each, item, f"{path}[{number}]") for number, each in enumerate(value)]
        assert isinstance(value, dict), f"{path} is no object"
        return {key: read(each, item, f"{path}.{key}") for key, each in value.items()}
    model = model_of(kind)
    assert isinstance(value, dict), f"{path} is no object"
    attributes = {field: attribute for attribute, field in model.attribute_map.items()}
    unknown = value.keys() - attributes
    assert not unknown, f"{path}: {kind} has no {', '.join(sorted(unknown))}"
    types = getattr(model, "openapi_types", None)
    fields = {
        attributes[field]: read(each, types[attributes[field]], f"{path}.{field}") for field, each in value.items()
    }
    return model(**fields)


for document in json.load(sys.stdin):
    version = document["apiVersion"].rpartition("/")[2]
    name = f"{version[0].upper()}{version[1:]}{document['kind']}"
    read(document, name, document["kind"])
    print(document["kind"])

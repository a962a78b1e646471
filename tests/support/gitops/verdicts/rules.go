package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	helm "github.com/fluxcd/helm-controller/api/v2"
	kustomize "github.com/fluxcd/kustomize-controller/api/v1"
	source "github.com/fluxcd/source-controller/api/v1"
	fleet "github.com/rancher/fleet/pkg/apis/fleet.cattle.io/v1alpha1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	work "open-cluster-management.io/api/work/v1"
	"sigs.k8s.io/yaml"
)

// What the files say about judging objects.
type rules struct {
	kustomizations []*kustomize.Kustomization
	fleets         []*fleet.FleetYAML
	works          []*work.ManifestWork
}

// Every document of the files, held against the type that its tool reads it into: a field that is
// not there or of another type is an error.
func readRules(paths []string) (*rules, error) {
	found := &rules{}
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
		for {
			document, err := documents.Read()
			if errors.Is(err, io.EOF) {
				break
			}
			if err == nil {
				err = found.add(filepath.Base(path), document)
			}
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
		}
	}
	return found, nil
}

func (r *rules) add(file string, document []byte) error {
	if file == "fleet.yaml" {
		r.fleets = append(r.fleets, &fleet.FleetYAML{})
		return yaml.UnmarshalStrict(document, r.fleets[len(r.fleets)-1])
	}
	var head metav1.TypeMeta
	if err := yaml.Unmarshal(document, &head); err != nil {
		return err
	}
	switch kind := head.GroupVersionKind().GroupKind().String(); kind {
	case "Kustomization.kustomize.toolkit.fluxcd.io":
		r.kustomizations = append(r.kustomizations, &kustomize.Kustomization{})
		return yaml.UnmarshalStrict(document, r.kustomizations[len(r.kustomizations)-1])
	case "ManifestWork.work.open-cluster-management.io":
		r.works = append(r.works, &work.ManifestWork{})
		return yaml.UnmarshalStrict(document, r.works[len(r.works)-1])
	case "GitRepository.source.toolkit.fluxcd.io":
		return yaml.UnmarshalStrict(document, &source.GitRepository{})
	case "HelmRelease.helm.toolkit.fluxcd.io":
		return yaml.UnmarshalStrict(document, &helm.HelmRelease{})
	case "GitRepo.fleet.cattle.io":
		return yaml.UnmarshalStrict(document, &fleet.GitRepo{})
	case "Namespace":
		return nil
	default:
		return fmt.Errorf("no type is known for %q", kind)
	}
}

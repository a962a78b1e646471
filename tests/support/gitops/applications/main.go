// Command applications says which Applications Argo CD makes of ApplicationSets, by Argo CD's own code.
//
//	applications FILE...  ApplicationSets in the files; the clusters' Secrets, as a JSON list on
//	                      standard input; the Applications by their set, as JSON on standard output
//
// Of generators it knows `clusters`, which goes by the Secrets of Argo CD's namespace.
package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/argoproj/argo-cd/v3/applicationset/controllers/template"
	"github.com/argoproj/argo-cd/v3/applicationset/generators"
	"github.com/argoproj/argo-cd/v3/applicationset/utils"
	argocd "github.com/argoproj/argo-cd/v3/pkg/apis/application/v1alpha1"
	"github.com/sirupsen/logrus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	kubernetesfake "k8s.io/client-go/kubernetes/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/yaml"
)

func main() {
	logrus.SetOutput(os.Stderr)
	logrus.SetLevel(logrus.WarnLevel)
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "applications:", err)
		os.Exit(1)
	}
}

func run(paths []string, from io.Reader, to io.Writer) error {
	var secrets []corev1.Secret
	if err := json.NewDecoder(from).Decode(&secrets); err != nil {
		return fmt.Errorf("standard input: %w", err)
	}
	made := map[string][]argocd.Application{}
	for _, path := range paths {
		sets, err := readSets(path)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, set := range sets {
			if made[set.Name], err = applications(set, secrets); err != nil {
				return fmt.Errorf("%s: %s: %w", path, set.Name, err)
			}
		}
	}
	return json.NewEncoder(to).Encode(made)
}

// Every document of the file, held against the type that Argo CD reads it into: a field that is not
// there or of another type is an error.
func readSets(path string) ([]argocd.ApplicationSet, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	sets := []argocd.ApplicationSet{}
	documents := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return sets, nil
		}
		if err != nil {
			return nil, err
		}
		var set argocd.ApplicationSet
		if err := yaml.UnmarshalStrict(document, &set); err != nil {
			return nil, err
		}
		if set.Kind != argocd.ApplicationSetSchemaGroupVersionKind.Kind {
			return nil, fmt.Errorf("an ApplicationSet was expected, not %q", set.Kind)
		}
		sets = append(sets, set)
	}
}

func applications(set argocd.ApplicationSet, secrets []corev1.Secret) ([]argocd.Application, error) {
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	found, known := fake.NewClientBuilder().WithScheme(scheme), []runtime.Object{}
	for index := range secrets {
		found = found.WithObjects(&secrets[index])
		known = append(known, &secrets[index])
	}
	reader := found.Build()
	byClusters := generators.NewClusterGenerator(
		context.Background(), reader, kubernetesfake.NewClientset(known...), set.Namespace)
	entry := logrus.WithField("applicationset", set.Name)
	made, _, err := template.GenerateApplications(
		entry, set, map[string]generators.Generator{"Clusters": byClusters}, &utils.Render{}, reader)
	return made, err
}

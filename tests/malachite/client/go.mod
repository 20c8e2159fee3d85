module client

go 1.18

require github.com/kubewharf/katalyst-core v0.5.47

// Replaces as in the module's own go.mod: they hold for the main module alone.
replace (
	k8s.io/api => k8s.io/api v0.24.6
	k8s.io/apiextensions-apiserver => k8s.io/apiextensions-apiserver v0.24.6
	k8s.io/apimachinery => k8s.io/apimachinery v0.24.6
	k8s.io/apiserver => k8s.io/apiserver v0.24.6
	k8s.io/cli-runtime => k8s.io/cli-runtime v0.24.6
	k8s.io/client-go => k8s.io/client-go v0.24.6
	k8s.io/cloud-provider => k8s.io/cloud-provider v0.24.6
	k8s.io/cluster-bootstrap => k8s.io/cluster-bootstrap v0.24.6
	k8s.io/code-generator => k8s.io/code-generator v0.24.6
	k8s.io/component-base => k8s.io/component-base v0.24.6
	k8s.io/component-helpers => k8s.io/component-helpers v0.24.6
	k8s.io/controller-manager => k8s.io/controller-manager v0.24.6
	k8s.io/cri-api => k8s.io/cri-api v0.24.6
	k8s.io/csi-translation-lib => k8s.io/csi-translation-lib v0.24.6
	k8s.io/klog => k8s.io/klog v1.0.0
	k8s.io/kube-aggregator => k8s.io/kube-aggregator v0.24.6
	k8s.io/kube-controller-manager => k8s.io/kube-controller-manager v0.24.6
	k8s.io/kube-openapi => k8s.io/kube-openapi v0.0.0-20220328201542-3ee0da9b0b42
	k8s.io/kube-proxy => k8s.io/kube-proxy v0.24.6
	k8s.io/kube-scheduler => k8s.io/kube-scheduler v0.24.6
	k8s.io/kubectl => k8s.io/kubectl v0.24.6
	k8s.io/kubelet => github.com/kubewharf/kubelet v1.24.6-kubewharf-pre.2
	k8s.io/kubernetes => k8s.io/kubernetes v1.24.6
	k8s.io/legacy-cloud-providers => k8s.io/legacy-cloud-providers v0.24.6
	k8s.io/metrics => k8s.io/metrics v0.24.6
	k8s.io/mount-utils => k8s.io/mount-utils v0.24.6
	k8s.io/node-api => k8s.io/node-api v0.24.6
	k8s.io/pod-security-admission => k8s.io/pod-security-admission v0.22.8
	k8s.io/sample-apiserver => k8s.io/sample-apiserver v0.24.6
	k8s.io/sample-cli-plugin => k8s.io/sample-cli-plugin v0.24.6
	k8s.io/sample-controller => k8s.io/sample-controller v0.24.6
	sigs.k8s.io/json => sigs.k8s.io/json v0.0.0-20211020170558-c049b76a60c6
)
